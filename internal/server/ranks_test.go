package server

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// unreachableURL is the address of an engine that does not answer. The attached rank keeps asking it.
func unreachableURL(n int) string { return fmt.Sprintf("http://127.0.0.1:%d", n) }

// newBackend makes the backend of a node that does not listen.
func newBackend(t *testing.T, files ...string) *backend {
	t.Helper()
	c := DefaultConfig()
	c.NodeID, c.DataDir = "n1", filepath.Join(t.TempDir(), "data")
	c.LogWriter, c.Ephemeral = io.Discard, true
	n, err := New(c)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	b := &backend{n}
	for _, f := range files {
		_, err := b.Deploy(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte(f)})
		require.NoError(t, err)
	}
	return b
}

const (
	edgeFile = `applications: [{name: edge, model: {id: edge}, ` +
		`engine: {kind: attach, ranks: [{url: "http://127.0.0.1:1"}]}}]`
	moeFile = `applications: [{name: moe, model: {id: moe}, data_parallel: {coupling: lockstep}, ` +
		`engine: {kind: attach, ranks: [{url: "http://127.0.0.1:1"}]}}]`
)

func (b *backend) spec(t *testing.T, name string) *app.Application {
	t.Helper()
	_, a := b.n.store.State().Pool(name)
	require.NotNil(t, a)
	return a
}

// Concurrent changes are repeated on the newer revision, and each rank has its own number.
func TestConcurrentRankChangesAllSucceed(t *testing.T) {
	b := newBackend(t, edgeFile)
	first := func() *state.Unit { return b.n.store.State().Units["edge/0/0"] }
	require.Eventually(t, func() bool { return first() != nil }, 30*time.Second, time.Millisecond)
	const n = 10
	var wg sync.WaitGroup
	var mu sync.Mutex
	numbers := map[int]bool{0: true}
	for i := range n {
		wg.Go(func() {
			c, err := b.AddRank(t.Context(), "edge", fmt.Appendf(nil, `{"url": %q}`, unreachableURL(i+2)))
			if !assert.NoError(t, err) { //nolint:testifylint // not in the test's own goroutine
				return
			}
			mu.Lock()
			defer mu.Unlock()
			assert.False(t, numbers[c.Rank], "rank %d twice", c.Rank)
			numbers[c.Rank] = true
		})
	}
	wg.Wait()
	a := b.spec(t, "edge")
	assert.Equal(t, n+1, a.DataParallel.DPSize)
	assert.Equal(t, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, a.RankNumbers(0))
	for i := range n {
		wg.Go(func() {
			_, err := b.RemoveRank(t.Context(), "edge",
				api.RankRemoval{Rank: app.RankRef{URL: unreachableURL(i + 2)}})
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	urls, err := b.Workers(t.Context(), "")
	require.NoError(t, err)
	assert.Equal(t, []string{unreachableURL(1)}, urls)
	assert.Equal(t, uint64(1), first().Epoch, "nobody touched it")
}

func TestRankChangesAreRefusedWithAReason(t *testing.T) {
	b := newBackend(t, edgeFile, moeFile)
	add := func(name, rank string) error { _, err := b.AddRank(t.Context(), name, []byte(rank)); return err }
	for name, c := range map[string]struct {
		err  error
		code problem.Code
		text string
	}{
		"unknown app": {
			add("egde", `{"url": "http://h:1"}`), problem.NotFound,
			`there is no application "egde"`,
		},
		"two apps": {
			add("", `{"url": "http://h:1"}`), problem.InvalidArgument,
			"there are 2 applications of kind attach",
		},
		"duplicate": {
			add("edge", `{"url": "http://127.0.0.1:1/"}`), problem.Conflict,
			"is attached already, as edge/0/0",
		},
		"lockstep":  {add("moe", `{"url": "http://h:1"}`), problem.Conflict, "one lockstep group"},
		"malformed": {add("edge", `{"url": "h"}`), problem.InvalidArgument, `url: found "h"`},
		"no node": {
			add("edge", `{"url": "http://h:1", "node": "n9"}`), problem.Unplaceable, "node n9 is not there",
		},
	} {
		require.Error(t, c.err, name)
		assert.Equal(t, c.code, problem.CodeOf(c.err), name)
		assert.Contains(t, c.err.Error(), c.text, name)
	}
	assert.Equal(t, uint64(1), b.n.store.State().Apps["edge"].Revision, "nothing has changed")
	require.NoError(t, b.Delete(t.Context(), "edge"))
	assert.Equal(t, problem.InvalidArgument, problem.CodeOf(add("", `{"url": "h"}`)), "the only one left")
	none := newBackend(t)
	_, err := none.Workers(t.Context(), "")
	assert.Equal(t, problem.NotFound, problem.CodeOf(err))
}

// The deployed file replaces changes at run time, and the answer lists the ranks that end.
func TestDeployReplacesRankChanges(t *testing.T) {
	b := newBackend(t, edgeFile)
	_, err := b.AddRank(t.Context(), "edge", []byte(`{"url": "http://127.0.0.1:2"}`))
	require.NoError(t, err)
	_, err = b.AddRank(t.Context(), "edge",
		[]byte(`{"url": "http://127.0.0.1:3", "addressing": "header", "selector": 4}`))
	require.NoError(t, err)
	zero := time.Duration(0)
	c, err := b.RemoveRank(t.Context(), "edge", api.RankRemoval{Rank: app.RankRef{Rank: 1}, Deadline: &zero})
	require.NoError(t, err)
	assert.Equal(t, unreachableURL(2), c.URL)
	assert.Equal(t, uint64(4), c.Revision)
	printed := (&app.File{Applications: []*app.Application{b.spec(t, "edge")}}).Print()
	assert.Contains(t, string(printed), "rank: 2", "the file it stands for says the number")
	res, err := b.Deploy(t.Context(), client.DeployRequest{File: "printed.yaml", Text: printed})
	require.NoError(t, err)
	require.Len(t, res.Changes, 1)
	assert.Equal(t, client.EffectUnchanged, res.Changes[0].Effect)

	res, err = b.Deploy(t.Context(), client.DeployRequest{File: "app.yaml", Text: []byte(edgeFile)})
	require.NoError(t, err)
	require.Len(t, res.Changes, 1)
	change := res.Changes[0]
	assert.Equal(t, client.EffectScale, change.Effect)
	var paths []string
	for _, d := range change.Diffs {
		paths = append(paths, d.Path)
	}
	assert.Equal(t, []string{
		"data_parallel.dp_size", "engine.ranks[http://127.0.0.1:3 selector 4]", "num_replicas",
	}, paths)
	assert.Equal(t, []string{"0/2 http://127.0.0.1:3 selector 4"}, change.Gone)
}

// RP36: A URL that answers the node's probe as an ingress of its own cluster does is no engine. Others are
// added.
func TestAddRankRefusesTheClustersOwnAddress(t *testing.T) {
	b := newBackend(t, edgeFile)
	var via string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Via") == via {
			w.WriteHeader(http.StatusLoopDetected)
		}
	}))
	t.Cleanup(srv.Close)
	body := fmt.Appendf(nil, `{"url": %q}`, srv.URL)

	via = "1.1 " + pseudonym(b.n)
	_, err := b.AddRank(t.Context(), "edge", body)
	require.ErrorContains(t, err, "this address leads back to this dpserve cluster")
	assert.Len(t, via, len("1.1 dpserve-01234567"))
	assert.NotContains(t, string(b.n.store.State().Apps["edge"].Spec), srv.URL)

	via = "1.1 another"
	_, err = b.AddRank(t.Context(), "edge", body)
	require.NoError(t, err)
}
