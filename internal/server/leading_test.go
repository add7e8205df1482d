package server

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Another node may have led between two checks, so the actors of the earlier election end.
func TestNewTermStartsNewLeaderActors(t *testing.T) {
	n := newBackend(t, edgeFile).n
	n.life.kill() // stop the loop that follows leadership
	n.life.loops.Wait()
	first, _ := n.leading.Current()
	require.NoError(t, n.leading.Adapt(t.Context()))
	still, _ := n.leading.Current()
	assert.Same(t, first, still, "the same term goes on")

	require.NoError(t, n.leading.StandDown())
	require.NoError(t, n.leading.Adapt(t.Context()))
	second, leads := n.leading.Current()
	require.True(t, leads)
	require.NotSame(t, first, second)
	assert.Len(t, second.control.Status(), 1, "the new controller goes on with the application")
}

// While no node leads, a node knows at least that it is there itself.
func TestNodesWithoutALeader(t *testing.T) {
	b := newBackend(t, edgeFile)
	b.n.life.kill() // stop the loop that follows leadership
	b.n.life.loops.Wait()
	require.NoError(t, b.n.leading.StandDown())
	list, err := b.Nodes(t.Context())
	require.NoError(t, err)
	require.Len(t, list, 1)
	assert.Equal(t, "alive", list[0].State)
	assert.Equal(t, "itself", list[0].SeenBy)
	assert.Contains(t, list[0].Reason, "no node leads")
}

// answering is a leader that answers with a status.
type answering func() int

func (a answering) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: a(), Body: http.NoBody}, nil
}

// A node says that it has left, and not that it was removed, after somebody has asked so at this node.
func TestANodeKnowsThatItWasAskedToLeave(t *testing.T) {
	for name, c := range map[string]struct {
		method, path string
		answer       int
		during, want bool
	}{
		"it leaves":         {http.MethodDelete, "/api/v1/nodes/n1", 202, true, true},
		"it is not drained": {http.MethodDelete, "/api/v1/nodes/n1", 409, true, false},
		"it may have left":  {http.MethodDelete, "/api/v1/nodes/n1", 503, true, true},
		"it has left":       {http.MethodDelete, "/api/v1/nodes/n1", 404, true, true},
		"another node":      {http.MethodDelete, "/api/v1/nodes/n2", 202, false, false},
		"it is looked at":   {http.MethodGet, "/api/v1/nodes/n1", 202, false, false},
		"its drain ends":    {http.MethodDelete, "/api/v1/nodes/n1/drain", 202, false, false},
	} {
		var leaves atomic.Bool
		leader := answering(func() int {
			assert.Equal(t, c.during, leaves.Load(), "%s: when the leader has the request", name)
			return c.answer
		})
		to := leaveTransport{leader, "n1", &leaves}
		res, err := to.RoundTrip(httptest.NewRequest(c.method, c.path, http.NoBody))
		require.NoError(t, err, name)
		require.NoError(t, res.Body.Close())
		assert.Equal(t, c.want, leaves.Load(), name)
	}
}
