package telemetry_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/dpserve/dpserve/internal/telemetry"
)

// lockedBuffer is written by the timer of a window too.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lockedBuffer) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.Reset()
}

// RP35: 5,000 lines of one cause in a second, another cause beside it, debug lines, 10,000 causes: 50 lines
// of each cause, then one line with the number of the others after a second; debug lines all; causes beyond
// 256 share one count.
func TestLimitLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var buf lockedBuffer
		plain := slog.NewTextHandler(&buf, &slog.HandlerOptions{Level: slog.LevelDebug})
		log := slog.New(telemetry.LimitLines(plain)).With(slog.String("component", "ingress"))
		count := func(part string) int { return strings.Count(buf.String(), part) }
		flood := func(n int, cause string) {
			for range n {
				log.Warn("request not served", slog.Int("code", 499), slog.String("cause", cause))
			}
		}

		flood(5000, "client_gone")
		flood(50, "not_found") // another cause has lines of its own
		for range 60 {
			log.Debug("request served")
		}
		assert.Equal(t, 50, count("cause=client_gone"))
		assert.Equal(t, 50, count("cause=not_found"))
		assert.Equal(t, 60, count("request served"), "debug lines are not limited")

		time.Sleep(time.Second)
		synctest.Wait()
		assert.Contains(t, buf.String(),
			`level=WARN msg="request not served … 4950 more" component=ingress cause=client_gone`)
		assert.Equal(t, 1, count("more"))

		buf.Reset()
		flood(51, "client_gone") // a new window
		assert.Equal(t, 50, count("cause=client_gone"))
		for i := range 10_000 { // the memory is bounded: causes beyond the bound share one count
			flood(1, fmt.Sprint("cause", i))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Contains(t, buf.String(),
			`msg="request not served … 1 more" component=ingress cause=client_gone`)
		assert.Contains(t, buf.String(), `msg="other log lines … 9695 more" component=ingress`)
		assert.Equal(t, 2, count("more"))
	})
}
