package system

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/test/harness"
)

// routed is simApp with a routing part.
func routed(name string, dp int, coupling, args, routing string) string {
	return simApp(name, dp, coupling, args) + "    routing: " + routing + "\n"
}

// OV3: engines of 64 blocks, busy_threshold 0.2. Under load something is refused; five seconds after it,
// nothing.
func TestOV3BusyThresholdLetsGo(t *testing.T) {
	t.Parallel()
	r := harness.Start(t)
	r.Expect(harness.RequestRefused)
	r.Deploy(routed("small", 2, "independent",
		"num_gpu_blocks_override: 64, max_model_len: 1024, sim_step_ms: 20", "{busy_threshold: 0.2}"))
	r.WaitStatus("small", "RUNNING")
	ask := func(client, i, tokens int) int {
		// 125 tokens: 8 of 64 blocks
		prompt := fmt.Sprintf("%d %d ", client, i) + strings.Repeat("word ", 100)
		resp, err := r.Post(t.Context(), "/v1/completions",
			fmt.Sprintf(`{"model":"small","prompt":%q,"max_tokens":%d,"ignore_eos":true}`, prompt, tokens))
		if err != nil {
			t.Error(err)
			return 0
		}
		defer resp.Body.Close()
		if resp.StatusCode == http.StatusServiceUnavailable {
			assert.NotEmpty(t, resp.Header.Get("Retry-After"))
		}
		return resp.StatusCode
	}
	var mu sync.Mutex
	during := map[int]int{}
	until := time.Now().Add(4 * time.Second)
	var wg sync.WaitGroup
	for client := range 16 {
		wg.Go(func() {
			for i := 0; time.Now().Before(until); i++ {
				status := ask(client, i, 60)
				mu.Lock()
				during[status]++
				mu.Unlock()
				if status != http.StatusOK {
					time.Sleep(50 * time.Millisecond) // what a client that waits would do, faster
				}
			}
		})
	}
	wg.Wait()
	r.Quiet()
	time.Sleep(5 * time.Second)
	after := map[int]int{}
	for i := range 20 {
		after[ask(99, i, 1)]++
	}
	assert.Positive(t, during[http.StatusServiceUnavailable])
	assert.Positive(t, during[http.StatusOK])
	assert.Equal(t, map[int]int{http.StatusOK: 20}, after)
	t.Logf("during: %v by status, idle: %v", during, after)
	r.Quiet()
	r.Delete("small")
	require.Empty(t, r.Children())
}
