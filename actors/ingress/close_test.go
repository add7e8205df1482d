package ingress

import (
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/state"
	"github.com/dpserve/dpserve/internal/telemetry"
)

// heldStore returns its newest state only when the test allows it.
type heldStore struct {
	*store
	held chan struct{}
}

func (s *heldStore) State() *state.State {
	<-s.held
	return s.store.State()
}

// TestCloseWhileAnApplicationComes: Close also ends what the last change of the state has started.
func TestCloseWhileAnApplicationComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &heldStore{newStore(), make(chan struct{}, 1)}
		s.held <- struct{}{}
		in, err := New(Config{
			Node: "n1", Store: s, Feed: &feed{}, Metrics: telemetry.New(),
			Log: slog.New(slog.DiscardHandler),
		})
		require.NoError(t, err)
		a := demoApp()
		a.Routing = byScore
		deploy(t, s.store, a, 1)
		closed := make(chan error, 1)
		synctest.Wait() // the change is being read
		go func() { closed <- in.Close(t.Context()) }()
		synctest.Wait()
		close(s.held)
		require.NoError(t, <-closed)
		require.NotNil(t, in.findAppRouter("demo").inputs().cache, "it came in time to have an index")
	})
}
