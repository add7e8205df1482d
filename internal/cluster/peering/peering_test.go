package peering

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

// heldState is the state of a test, which a test changes by hand.
type heldState struct{ held *state.State }

func (h *heldState) State() *state.State { return h.held }

func (h *heldState) Changed() <-chan struct{} { return nil }

// memberConfig is a node in a data dir, without gossip.
func memberConfig(dir string, st *heldState) Config {
	return Config{
		NodeID: "n1", Version: "v1", DataDir: dir, Host: "127.0.0.1",
		DefaultRoles: []string{"control", "worker"},
		Store:        st, Refused: func(string) {}, Log: slog.New(slog.DiscardHandler),
	}
}

// newDataDir returns the path of a data dir that dpserve makes.
func newDataDir(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "data")
}

// opened opens a node that must succeed. The test closes it.
func opened(t *testing.T, cfg Config) *Peering {
	t.Helper()
	p, err := Open(t.Context(), cfg)
	require.NoError(t, err)
	return p
}

// refusal is the error of a node that must not open.
func refusal(t *testing.T, cfg Config) error {
	t.Helper()
	p, err := Open(t.Context(), cfg)
	if err == nil {
		require.NoError(t, p.Close())
	}
	require.Error(t, err)
	return err
}

// founder founds a cluster in a data dir and stops.
func founder(t *testing.T, dir string) (state.Secrets, pki.Files) {
	t.Helper()
	st := &heldState{state.New()}
	p := opened(t, memberConfig(dir, st))
	assert.True(t, p.IsFounding())
	_, err := pki.Load(p.dir)
	require.Error(t, err, "a crash before the state holds the authority leaves no certificate")
	st.held.Secrets = p.secrets
	require.NoError(t, p.SaveAuthority())
	require.NoError(t, p.Close())
	return p.secrets, p.Certificates.files
}

func TestAFounderComesBackWithItsRoles(t *testing.T) {
	dir := newDataDir(t)
	secrets, _ := founder(t, dir)
	st := &heldState{state.New()}
	cfg := memberConfig(dir, st)
	p := opened(t, cfg)
	assert.False(t, p.IsFounding())
	assert.Equal(t, []string{"control", "worker"}, p.Roles())
	rec := p.Record()
	assert.Equal(t, p.Address(), rec.Address)
	assert.Equal(t, state.GossipKeySum(secrets.GossipKey), rec.GossipSum)
	require.NoError(t, p.Close())

	cfg.Roles = []string{"worker"}
	require.ErrorContains(t, refusal(t, cfg), "this node has joined with roles control,worker, not worker")
	cfg.Roles = []string{"worker", "control"}
	require.NoError(t, opened(t, cfg).Close())
	require.NoError(t, RefuseStandalone(dir), "a founder may stand alone")
}

// The state of another authority means that the certificate files were lost.
func TestAFounderWithoutItsFilesIsRefused(t *testing.T) {
	st := &heldState{state.New()}
	p := opened(t, memberConfig(newDataDir(t), st))
	st.held.Secrets.Authority = []byte("of before")
	err := p.SaveAuthority()
	assert.Equal(t, problem.Conflict, problem.CodeOf(err))
	require.ErrorContains(t, err, "the certificates of this node's cluster are gone")
	require.NoError(t, p.Close())
}

// joining is the config of a node that joins the cluster of files; lost is the error of its first answers.
func joining(t *testing.T, dir string, files pki.Files, lost *error) Config {
	t.Helper()
	cfg := memberConfig(dir, &heldState{state.New()})
	token, err := pki.NewToken(files.Authority)
	require.NoError(t, err)
	var first []byte
	cfg.Join = &Join{Address: "127.0.0.1:1", Token: token.String()}
	cfg.Join.Present = func(_ context.Context, self state.Node, key []byte) (pki.Files, []state.Node, error) {
		if first == nil {
			first = key
		}
		assert.Equal(t, first, key, "a repeated join has the same key")
		if *lost != nil {
			return pki.Files{}, nil, *lost
		}
		own := pki.Files{Key: key, Authority: files.Authority, GossipKey: files.GossipKey}
		authority, err := pki.LoadAuthority(files.Authority, files.AuthorityKey)
		require.NoError(t, err)
		csr, err := pki.NewCSR(key)
		require.NoError(t, err)
		cert, err := files.Credentials()
		require.NoError(t, err)
		id := pki.Identity{Cluster: cert.Identity.Cluster, Node: self.ID, UID: self.UID}
		for _, r := range self.Roles {
			id.Roles = append(id.Roles, string(r))
		}
		own.Cert, err = authority.Sign(csr, id, cert.NotAfter.Add(-pki.DefaultLife), pki.DefaultLife)
		return own, []state.Node{{ID: "n0", UID: "u0", Address: "127.0.0.1:1"}}, err
	}
	return cfg
}

func TestAMemberJoinsOnceAndComesBack(t *testing.T) {
	secrets, files := founder(t, newDataDir(t))
	files.AuthorityKey = secrets.AuthorityKey
	dir, lost := newDataDir(t), errors.New("the answer was lost")
	cfg := joining(t, dir, files, &lost)
	require.ErrorIs(t, refusal(t, cfg), lost)
	lost = nil
	torn, held := filepath.Join(dir, "pki", seedsFile), filepath.Join(dir, "held")
	require.NoError(t, os.WriteFile(torn, []byte("torn"), 0o600))
	require.NoError(t, os.Link(torn, held))
	p := opened(t, cfg)
	was, err := os.ReadFile(held)
	require.NoError(t, err)
	assert.Equal(t, "torn", string(was), "the seeds are replaced as a whole: the certificate needs them")
	assert.Empty(t, p.RejoinAddress())
	address, ok := p.Neighbours.Resolve("u0")
	assert.True(t, ok)
	assert.Equal(t, "127.0.0.1:1", address)
	assert.Contains(t, p.Neighbours.All(), "n0", "the seeds, before the state is there")
	require.NoError(t, p.Close())
	require.Error(t, RefuseStandalone(dir))

	lost = errors.New("it must not join again")
	p = opened(t, cfg)
	assert.Equal(t, "127.0.0.1:1", p.RejoinAddress())
	require.NoError(t, p.Close())

	other, otherFiles := founder(t, newDataDir(t))
	otherFiles.AuthorityKey = other.AuthorityKey
	require.ErrorContains(t, refusal(t, joining(t, dir, otherFiles, &lost)), "belongs to another cluster")
}

// A removed node learns it from the state, and its data dir says so to a later process.
func TestARemovedNodeDoesNotComeBack(t *testing.T) {
	dir := newDataDir(t)
	founder(t, dir)
	st := &heldState{state.New()}
	p := opened(t, memberConfig(dir, st))
	torn, held := filepath.Join(p.dir, removedFile), filepath.Join(dir, "held")
	require.NoError(t, os.WriteFile(torn, []byte("torn"), 0o600))
	require.NoError(t, os.Link(torn, held))
	st.held.Removed = []string{p.Identity().UID}
	p.WatchRemoval(t.Context())
	was, err := os.ReadFile(held)
	require.NoError(t, err)
	assert.Equal(t, "torn", string(was), "the note is replaced as a whole and synced: a power cut leaves it")
	select {
	case <-p.Removed():
	default:
		t.Error("it does not know")
	}
	require.NoError(t, p.Close())
	assert.Equal(t, problem.PermissionDenied, problem.CodeOf(refusal(t, memberConfig(dir, st))))
}

// A record of the state has an older address than the operator's join.
func TestNeighboursAtTheirLastAddress(t *testing.T) {
	st := &heldState{state.New()}
	b := &Neighbours{self: "u1", store: st, seeds: []state.Node{{ID: "n2", UID: "u2", Address: "seed"}}}
	assert.Equal(t, "seed", b.Get("n2").Address)
	st.held.Nodes["n3"] = &state.Node{ID: "n3", UID: "u3", Address: "old"}
	assert.Nil(t, b.Get("n2"), "the state counts as soon as it is there")
	b.met.Store(&state.Node{UID: "u3", Address: "new"})
	assert.Equal(t, "new", b.Get("n3").Address)
	assert.Equal(t, "new", b.All()["n3"].Address)
	assert.Equal(t, "old", st.held.Nodes["n3"].Address, "the state is shared")
	assert.True(t, b.IsHeard("u9"), "without gossip nobody is silent")
}
