package inprocess

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/test/harness"
)

// CC14: under power-of-two, one session of 100,000 tokens runs on one of four ranks for two minutes, beside
// short requests. Status and doctor name max/mean, the rank, and policies that would balance the ranks; at
// most a minute after the session has ended they do not. One event says when it began, one when it ended.
func TestCC14UnevenLoadIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := harness.New(t)
		c.Deploy(simApp("chat", 4, "independent", "max_model_len: 131072, sim_step_ms: 100",
			"routing: {policy: power-of-two}"))
		c.WaitStatus("chat", "RUNNING")
		r, stop, ended := rand.New(rand.NewPCG(14, 14)), make(chan struct{}), make(chan time.Time, 1)
		long, short := freshPrompt(r, 100_000), freshPrompt(r, 100)
		var session *idAnswer
		go func() {
			session = askIDs(t.Context(), c, "chat", long, 1200)
			ended <- time.Now()
		}()
		clients := crowd(4, stop, func() { assert.True(t, askIDs(t.Context(), c, "chat", short, 50).ok()) })
		imbalances := func() []client.Imbalance {
			st, _ := c.App("chat")
			return st.Imbalances
		}
		c.Until("an imbalance", func() error {
			if len(imbalances()) == 0 {
				return errors.New("none")
			}
			return nil
		})
		im := imbalances()[0]
		st, _ := c.App("chat")
		warnings := doctor.Examine(&doctor.Facts{Cluster: &doctor.Cluster{Apps: []client.AppStatus{st}}})
		at := <-ended
		require.True(t, session.ok(), session)
		require.Greater(t, at.Sub(im.Since), 80*time.Second, "the session goes on for two minutes")
		assert.Len(t, im.Ranks, 1)
		assert.Equal(t, "chat/"+session.rank, im.Ranks[0].Rank)
		assert.InDelta(t, 3.9, im.MaxMean, 0.1)
		assert.Equal(t, []string{"mex", "kv", "least-kv", "scoring"}, im.Policies)
		warnings = slices.DeleteFunc(warnings, func(f doctor.Finding) bool { return f.Check != "balance" })
		require.Len(t, warnings, 1)
		assert.Equal(t, doctor.Warn, warnings[0].Level)
		assert.Equal(t, "chat: "+im.String(), warnings[0].Found)
		assert.NotEmpty(t, imbalances(), "the last minute counts")
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Empty(t, imbalances())
		var changes []string
		for _, e := range c.Events("chat") {
			if e.Phase == "load-uneven" || e.Phase == "load-even" {
				changes = append(changes, e.Phase)
			}
		}
		assert.Equal(t, []string{"load-uneven", "load-even"}, changes)
		close(stop)
		clients.Wait()
		c.Quiet()
	})
}
