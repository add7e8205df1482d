package sim

import (
	"bytes"
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/engine/enginelog"
)

// What a slow load writes is read as a real engine's lines are; a quick one writes none.
func TestASlowLoadSaysWhatItDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Default()
		cfg.StartExit = true // the load is enough
		var quick, slow bytes.Buffer
		signals := make(chan os.Signal)
		assert.Equal(t, exitStartup, Run(context.Background(), cfg, signals, &quick, &quick))
		assert.NotContains(t, quick.String(), "Loading")

		cfg.Startup = 42 * time.Second
		began := time.Now()
		assert.Equal(t, exitStartup, Run(context.Background(), cfg, signals, &slow, &slow))
		assert.Equal(t, 42*time.Second, time.Since(began))
		var r enginelog.Reader
		stream := r.Stream()
		var seen []string
		for part := range strings.SplitAfterSeq(slow.String(), "]") { // between two updates of the bar
			_, _ = stream.Write([]byte(part))
			if p := r.Progress(); len(seen) == 0 || seen[len(seen)-1] != p {
				seen = append(seen, p)
			}
		}
		for _, want := range []string{
			"loading weights 0 of 8", "loading weights 8 of 8", "making its KV cache of 1.00 GiB",
			"capturing graphs 7 of 8 (decode, FULL)", "opening its API",
		} {
			assert.Contains(t, seen, want)
		}
	})
}

// A signal ends a load, and the load writes nothing more.
func TestASlowLoadEndsWithASignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Default()
		cfg.Startup = 42 * time.Second
		signals := make(chan os.Signal)
		var log bytes.Buffer
		ended := make(chan int)
		go func() { ended <- Run(context.Background(), cfg, signals, &log, &log) }()
		time.Sleep(10 * time.Second)
		signals <- syscall.SIGTERM
		assert.Equal(t, exitOK, <-ended)
		assert.Contains(t, log.String(), "| 3/8 [")
		assert.NotContains(t, log.String(), "| 4/8 [")
	})
}
