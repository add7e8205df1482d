package ingress

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/simulate"
)

// TestATraceOfRequests: each request that computes a prompt is one line, with the engine's count of tokens.
// One that failed has the Router's estimate. Equal beginnings have equal hashes under each policy.
func TestATraceOfRequests(t *testing.T) {
	for _, policy := range []string{"round-robin", "kv"} {
		t.Run(policy, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "trace.jsonl")
			fails := false
			g := newRig(t, options{
				trace: path, app: func(a *app.Application) { a.Routing.Policy = policy },
				engines: []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
					if fails {
						w.WriteHeader(http.StatusBadRequest)
						return
					}
					w.Header().Set("Content-Type", "application/json")
					_, _ = fmt.Fprint(w, `{"choices":[{"text":"a","finish_reason":"stop"}],`+
						`"usage":{"prompt_tokens":1500,"completion_tokens":9}}`)
				}},
			})
			system := strings.Repeat("be nice ", 600)
			ask := func(path, rest string, status int) {
				require.Equal(t, status, g.post(path, `{"model":"demo",`+rest+`}`).status)
			}
			ask("/v1/completions", `"prompt":"`+system+strings.Repeat("one", 500)+`"`, http.StatusOK)
			ask("/v1/completions", `"prompt":"`+system+strings.Repeat("two", 500)+`"`, http.StatusOK)
			ask("/v1/completions", `"prompt":[`+strings.Repeat("1,", 1499)+`1]`, http.StatusOK)
			ask("/tokenize", `"prompt":"`+system+`"`, http.StatusOK)
			fails = true
			ask("/v1/completions", `"prompt":"`+system+`"`, http.StatusBadRequest)
			require.NoError(t, g.in.Close(t.Context()))

			file, err := os.Open(path)
			require.NoError(t, err)
			defer file.Close()
			got, _, err := simulate.ReadTrace(file, 0)
			require.NoError(t, err)
			require.Len(t, got, 4)
			for i := range 3 {
				assert.Equal(t, []int{1500, 9}, []int{got[i].Prompt, got[i].Output})
				assert.Len(t, got[i].Blocks, 2)
			}
			assert.Equal(t, got[0].Blocks, got[1].Blocks, "4,096 equal bytes")
			assert.NotContains(t, got[0].Blocks, got[2].Blocks[0], "token ids")
			assert.Equal(t, 1, got[3].Output, "a trace has at least one token")
			assert.InDelta(t, 4800/4, got[3].Prompt, 400)
			assert.Equal(t, got[0].Blocks[0], got[3].Blocks[0])
		})
	}
}
