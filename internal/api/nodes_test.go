package api_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/problem"
)

// fakeNodes records requests; the cluster has nodes a and b.
type fakeNodes struct {
	asked   []string
	token   client.TokenRequest
	revoked []string
	behind  []string // nodes without the gossip key
}

func (k *fakeNodes) Nodes(context.Context) ([]client.NodeStatus, error) {
	return []client.NodeStatus{
		{Node: "a", State: "alive", Roles: []string{"control"}}, {Node: "b", State: "lost"},
	}, nil
}

func (k *fakeNodes) ask(what, node string) error {
	k.asked = append(k.asked, what+" "+node)
	if node != "a" && node != "b" {
		return problem.New(problem.NotFound, "there is no node %q", node).WithHint("nodes are a, b")
	}
	return nil
}

func (k *fakeNodes) Drain(_ context.Context, node string, deadline *time.Duration) error {
	if deadline != nil {
		node, what := node, "drain in "+deadline.String()
		return k.ask(what, node)
	}
	return k.ask("drain", node)
}

func (k *fakeNodes) Undrain(_ context.Context, node string) error { return k.ask("undrain", node) }
func (k *fakeNodes) CheckLeave(_ context.Context, node string) error {
	return k.ask("check leave", node)
}
func (k *fakeNodes) Remove(_ context.Context, node string) error { return k.ask("remove", node) }

func (k *fakeNodes) NewToken(_ context.Context, req client.TokenRequest) (client.Token, error) {
	k.token = req
	return client.Token{Token: "dpj1.x", Address: "10.0.0.1:7947", Uses: req.Uses}, nil
}

func (k *fakeNodes) Tokens(context.Context) ([]client.JoinToken, error) {
	return []client.JoinToken{
		{ID: "5f2c9d0e11aa", Status: "valid", Roles: []string{"worker"}, UsesLeft: 1},
	}, nil
}

func (k *fakeNodes) RevokeToken(_ context.Context, id string) error {
	k.revoked = append(k.revoked, id)
	return nil
}

func (k *fakeNodes) RotateKey(context.Context) ([]string, error) { return k.behind, nil }

func TestNodesByClient(t *testing.T) {
	k := &fakeNodes{}
	_, c := serve(t, api.Config{Backend: newBackend(), Nodes: k})
	ctx := t.Context()
	list, err := c.Nodes(ctx)
	require.NoError(t, err)
	assert.Equal(t, []string{"a", "b"}, []string{list[0].Node, list[1].Node})
	half := 30 * time.Minute
	require.NoError(t, c.Drain(ctx, "b", &half))
	require.NoError(t, c.Drain(ctx, "a", nil))
	require.NoError(t, c.Undrain(ctx, "a"))
	require.NoError(t, c.CheckLeave(ctx, "b"))
	require.NoError(t, c.RemoveNode(ctx, "b"))
	err = c.Drain(ctx, "nowhere", nil)
	assert.Equal(t, client.CodeNotFound, client.CodeOf(err))
	assert.Equal(t,
		[]string{
			"drain in 30m0s b", "drain a", "undrain a", "check leave b", "remove b",
			"drain nowhere",
		}, k.asked)
	token, err := c.NewToken(ctx, client.TokenRequest{TTL: time.Minute, Uses: 4})
	require.NoError(t, err)
	assert.Equal(t, "dpj1.x", token.Token)
	assert.Equal(t, client.TokenRequest{TTL: time.Minute, Uses: 4}, k.token)
	for _, k.behind = range [][]string{nil, {"b"}} {
		rotation, err := c.RotateKey(ctx)
		require.NoError(t, err)
		assert.Equal(t, client.KeyRotation{Behind: k.behind}, rotation)
	}
}

// HF73: the client makes, lists and revokes tokens; revoking without an id is refused.
func TestTokensByClient(t *testing.T) {
	k := &fakeNodes{}
	_, c := serve(t, api.Config{Backend: newBackend(), Nodes: k})
	req := client.TokenRequest{TTL: time.Minute, Uses: 4, Roles: []string{"worker", "ingress"}}
	_, err := c.NewToken(t.Context(), req)
	require.NoError(t, err)
	assert.Equal(t, req, k.token)
	list, err := c.Tokens(t.Context())
	require.NoError(t, err)
	assert.Equal(t, []client.JoinToken{
		{ID: "5f2c9d0e11aa", Status: "valid", Roles: []string{"worker"}, UsesLeft: 1},
	}, list)
	require.NoError(t, c.RevokeToken(t.Context(), "5f2c9d0e11aa"))
	require.NoError(t, c.RevokeAllTokens(t.Context()))
	assert.Equal(t, []string{"5f2c9d0e11aa", ""}, k.revoked)
	require.Error(t, c.RevokeToken(t.Context(), ""), "no id is not all of them")
	assert.Len(t, k.revoked, 2)
}

// HF73: a token with unknown or double roles, without uses or time, or with too many of them is refused.
func TestTokensAreBounded(t *testing.T) {
	_, c := serve(t, api.Config{Backend: newBackend(), Nodes: &fakeNodes{}})
	for _, req := range []client.TokenRequest{
		{TTL: time.Minute, Uses: 1, Roles: []string{"work"}},
		{TTL: time.Minute, Uses: 1, Roles: []string{"worker", "worker"}},
		{TTL: time.Minute},
		{TTL: 0, Uses: 1},
		{TTL: 365 * 24 * time.Hour, Uses: 1},
		{TTL: time.Minute, Uses: 1 << 20},
	} {
		_, err := c.NewToken(t.Context(), req)
		assert.Equal(t, client.CodeInvalidArgument, client.CodeOf(err), req)
	}
}

func TestPlanByClient(t *testing.T) {
	_, c := serve(t, api.Config{Backend: newBackend()})
	p, err := c.Plan(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte("x")})
	require.NoError(t, err)
	assert.Equal(t, uint64(7), p.Revision)
	_, err = c.Plan(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte("faulty")})
	require.Error(t, err)
}

// Requests that only the leader can answer are forwarded once; requests about this node are not.
func TestForward(t *testing.T) {
	leader := httptest.NewServer(http.NotFoundHandler())
	defer leader.Close()
	var sent []string
	to := http.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.Method+" "+r.URL.Path)
		w.WriteHeader(http.StatusTeapot)
	}))
	away := true
	s := api.NewServer(api.Config{
		Backend: newBackend(), Nodes: &fakeNodes{}, Forward: func() (http.Handler, bool) { return to, away },
		NoLeader: func() error { return problem.New(problem.Unavailable, "nobody leads") },
	})
	ask := func(method, path string, headers ...string) int {
		r := httptest.NewRequestWithContext(t.Context(), method, "http://127.0.0.1:8265"+path, nil)
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		w := httptest.NewRecorder()
		s.Handler().ServeHTTP(w, r)
		return w.Code
	}
	assert.Equal(t, http.StatusTeapot, ask(http.MethodGet, "/api/v1/apps"))
	assert.Equal(t, http.StatusTeapot, ask(http.MethodPost, "/api/v1/nodes/a/drain"))
	assert.Equal(t, http.StatusOK, ask(http.MethodGet, "/api/v1/version"))
	assert.Equal(t, http.StatusServiceUnavailable,
		ask(http.MethodGet, "/api/v1/apps", "X-Dpserve-Forwarded", "1"), "not in circles")
	assert.Equal(t, []string{"GET /api/v1/apps", "POST /api/v1/nodes/a/drain"}, sent)
	to = nil
	assert.Equal(t, http.StatusServiceUnavailable, ask(http.MethodGet, "/api/v1/apps"), "nobody leads")
	away = false
	assert.Equal(t, http.StatusOK, ask(http.MethodGet, "/api/v1/apps"))
	assert.Equal(t, http.StatusOK, ask(http.MethodGet, "/api/v1/apps", "X-Dpserve-Forwarded", "1"))
}
