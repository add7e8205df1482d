package membership

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// A peer that stands still is not taken for one with another key.
func TestSilenceIsNoRefusal(t *testing.T) {
	const header = "failed to receive and remove the stream label header: "
	assert.Equal(t, BadKey, reasonOf(header+"cannot decode label from=10.0.0.1:39982"))
	assert.Empty(t, reasonOf(header+"read tcp 10.0.0.2:7946->10.0.0.1:39982: i/o timeout"))
}

// HF75: memberlist says of a node that only TCP reached it. Once may be a restart of that node, twice is a
// warning.
func TestUDPIsBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		l := newLogReader(slog.New(slog.NewTextHandler(&out, nil)), func(Reason) {})
		say := func(node string) int {
			_, _ = fmt.Fprintf(l, "2000/01/01 [WARN] memberlist: Was able to connect to %s over TCP but UDP "+
				"probes failed, network may be misconfigured\n", node)
			return strings.Count(out.String(), "level=WARN msg=\"gossip reaches a node over TCP only")
		}
		assert.Zero(t, say("a"))
		assert.Zero(t, say("b"))
		time.Sleep(noUDPAgain)
		assert.Zero(t, say("a"))
		time.Sleep(time.Minute)
		assert.Equal(t, 1, say("a"))
		assert.Equal(t, 1, say("a"), "at most one line a minute")
		time.Sleep(noUDPEvery)
		assert.Equal(t, 2, say("a"))
	})
}
