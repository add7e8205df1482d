package noderpc

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/cluster"
	"github.com/dpserve/dpserve/internal/cluster/pki"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// withCluster runs f on fake time.
func withCluster(t *testing.T, f func(t *testing.T, w *testCluster), names ...string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newTestCluster(t, names...)
		defer synctest.Wait()
		defer w.close()
		f(t, w)
	})
}

func report(node string) *msg.NodeReport {
	return &msg.NodeReport{
		Node: state.Node{ID: node, UID: "uid-" + node, Roles: rolesNamed(node)}, Index: 5,
		Events: []msg.UnitEvent{{Number: 8, Unit: "chat/0", Kind: msg.UnitReady}},
	}
}

func TestRenewFindsTheLeader(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		l := w.setLeader("c")
		for _, node := range []string{"a", "b", "c"} {
			lease, err := w.nodes[node].client.Renew(t.Context(), report(node))
			require.NoError(t, err, node)
			assert.Equal(t, msg.Lease{TTL: state.LeaseTTL, Leader: "c", Acked: 8, Index: 5}, lease)
		}
		for _, m := range w.nodes {
			m.hint.Store("") // no node has a hint
		}
		l2 := w.setLeader("b")
		for _, m := range w.nodes {
			m.hint.Store("")
		}
		w.nodes["c"].hint.Store("b")
		_, err := w.nodes["a"].client.Renew(t.Context(), report("a"))
		require.NoError(t, err, "the old leader names the new one")
		assert.Equal(t, []int64{3, 1}, []int64{l.renewals.Load(), l2.renewals.Load()})
	}, "a", "b", "c")
}

func TestRenewWithoutLeader(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		_, err := w.nodes["a"].client.Renew(t.Context(), report("a"))
		require.ErrorIs(t, err, cluster.ErrNotLeader)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		w.nodes["b"].server.Stop()
		_, err = w.nodes["a"].client.Renew(t.Context(), report("a"))
		require.ErrorIs(t, err, errUnreachable)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
	}, "a", "b")
}

func TestRenewOfAnotherNodeIsRefused(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		l := w.setLeader("b")
		_, err := w.nodes["a"].client.Renew(t.Context(), report("b"))
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		other := report("a")
		other.Node.UID = "uid-of-a-wiped-disk"
		_, err = w.nodes["a"].client.Renew(t.Context(), other)
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		assert.Zero(t, l.renewals.Load())

		l.err = problem.New(problem.PermissionDenied, "removed")
		_, err = w.nodes["a"].client.Renew(t.Context(), report("a"))
		require.EqualError(t, err, "removed")
		assert.Equal(t, int64(1), l.renewals.Load(), "a refusal is an answer")
	}, "a", "b")
}

// TestRenewGoesOnToTheOthers: a leader that fell silent costs one renewal, not the lease.
func TestRenewGoesOnToTheOthers(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		l := w.setLeader("b")
		a := w.nodes["a"]
		_, err := a.client.Renew(t.Context(), report("a"))
		require.NoError(t, err)
		w.nodes["b"].server.Stop() // its node is gone; the hint is old
		w.nodes["c"].leads.Store(l)
		_, err = a.client.Renew(t.Context(), report("a"))
		require.NoError(t, err)
	}, "a", "b", "c")
}

// TestRenewAfterASilentLeader: it is asked last from then on, also if the caller's deadline ended before the
// query's own limit.
func TestRenewAfterASilentLeader(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		l := w.setLeader("b")
		a := w.nodes["a"]
		_, err := a.client.Renew(t.Context(), report("a"))
		require.NoError(t, err)
		l.silent.Store(true)
		w.setLeader("c")
		w.nodes["b"].leads.Store(l) // it believes that it still leads
		a.hint.Store("")            // and a does not know better
		ctx, cancel := context.WithTimeout(t.Context(), renewLimit/2)
		defer cancel()
		_, err = a.client.Renew(ctx, report("a"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
		lease, err := a.client.Renew(t.Context(), report("a"))
		require.NoError(t, err)
		assert.Equal(t, "c", lease.Leader)
	}, "a", "b", "c")
}

// TestJudgeIsFair: a node that got only the rest of the caller's time does not count as silent.
func TestJudgeIsFair(t *testing.T) {
	why := errors.New("start given up")
	over, stop := context.WithTimeoutCause(t.Context(), 0, why)
	defer stop()
	left, leave := context.WithCancel(t.Context())
	leave()
	silent := problem.New(problem.Timeout, "node b: %w", context.DeadlineExceeded)
	for name, c := range map[string]struct {
		ctx          context.Context //nolint:containedctx // a row of the table
		err          error
		asked        time.Duration
		known, avoid string
	}{
		"silent for the limit":          {t.Context(), silent, time.Second, "", "b"},
		"silent until the caller left":  {left, context.Canceled, time.Second, "b", ""},
		"silent until the caller's end": {over, why, fairWait, "", "b"},
		"asked at the caller's end":     {over, why, time.Millisecond, "b", ""},
		"heard that its time is over":   {t.Context(), silent, time.Millisecond, "b", ""},
		"gone at once":                  {t.Context(), addUnreachable(why), 0, "", "b"},
		"answered at the caller's end":  {over, nil, time.Second, "b", ""},
		"refused, which is an answer": {
			t.Context(), problem.New(problem.PermissionDenied, "removed"), 0,
			"b", "",
		},
		"does not lead, and knows no one": {t.Context(), refuseNotLeader(""), 0, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			client := &LeaderClient{lastLeader: "b"}
			client.noteResult(c.ctx, "b", c.err, c.asked)
			assert.Equal(t, []string{c.known, c.avoid}, []string{client.lastLeader, client.lastSilent})
		})
	}
}

func TestUnknownMessagesAreCounted(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.setLeader("b")
		a, b := w.nodes["a"], w.nodes["b"]
		r := report("a")
		r.Events = append(r.Events, msg.UnitEvent{Number: 9, Unit: "chat/0", Kind: "of_the_future"})
		lease, err := a.client.Renew(t.Context(), r)
		require.NoError(t, err)
		assert.Equal(t, uint64(9), lease.Acked)
		assert.Equal(t, int64(1), b.unknown.Load())

		conn, err := a.conns.Get("b")
		require.NoError(t, err)
		err = invoke(t.Context(), conn, "/dpserve.v1.Control/Dance", "{}")
		assert.Equal(t, problem.Unavailable, problem.CodeOf(fromStatus("b", err)))
		assert.Equal(t, int64(2), b.unknown.Load())

		err = invoke(t.Context(), conn, string(assignCall),
			`{"App":"chat","ReplicaID":"chat.0.3","Mood":"blue"}`)
		require.NoError(t, err, "a field of a later version is passed over")
		assert.Equal(t, int64(3), b.unknown.Load())
	}, "a", "b")
}

// invoke calls a method with a message in any form.
func invoke(ctx context.Context, conn *grpc.ClientConn, method, text string) error {
	return conn.Invoke(ctx, method, []byte(text), new([]byte), grpc.CallContentSubtype(CodecName))
}

func TestAssignSurvivesAChangeOfLeader(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.nodes["b"].server.Stop()
		time.AfterFunc(3*time.Second, func() { w.setLeader("c") })
		began := time.Now()
		r, err := w.nodes["a"].client.Assign(t.Context(), "chat", 0, "chat.0.3")
		require.NoError(t, err)
		assert.Equal(t, msg.AssignReply{Rank: 3, Epoch: 2, DPSize: 8}, r)
		assert.Less(t, time.Since(began), 3*time.Second+roundPauseMax+time.Millisecond, "fake time")

		l := w.setLeader("a")
		r, err = w.nodes["a"].client.Assign(t.Context(), "chat", 0, "chat.0.3")
		require.NoError(t, err)
		assert.Equal(t, 3, r.Rank, "in-process")
		l.err = problem.New(problem.Unavailable, "not granted")
		_, err = w.nodes["c"].client.Assign(t.Context(), "chat", 0, "chat.0.3")
		require.EqualError(t, err, "not granted", "a typed refusal is an answer")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("start given up"))
		defer cancel()
		w.setLeader("nobody")
		_, err = w.nodes["c"].client.Assign(ctx, "chat", 0, "chat.0.3")
		require.Error(t, err)
	}, "a", "b", "c")
}

// TestAwaitSurvivesLeaders: one steps down, one dies, one falls silent; the last one answers.
func TestAwaitSurvivesLeaders(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		first := w.setLeader("b")
		got := make(chan msg.AwaitReply, 1)
		go func() {
			said, err := w.nodes["a"].client.Await(t.Context(), "moe/0", 1, 4)
			assert.NoError(t, err)
			got <- said
		}()
		time.Sleep(10 * time.Second)
		assert.Equal(t, int64(3), first.awaits.Load(), "held and asked again")
		second := w.setLeader("c") // b steps down
		time.Sleep(time.Second)
		assert.Equal(t, int64(1), second.awaits.Load())
		w.nodes["c"].server.Stop() // c dies
		time.Sleep(time.Second)
		third := w.setLeader("b")
		w.nodes["a"].client.Publish(msg.Publish{
			Unit: "moe/0", Epoch: 1, Addr: "10.0.0.1", Port: 7, Settings: "block size 16",
		})
		assert.Equal(t, msg.AwaitReply{Addr: "10.0.0.1", Port: 7, Settings: "block size 16"}, <-got)
		assert.Positive(t, third.awaits.Load())

		late, err := w.nodes["b"].client.Await(t.Context(), "moe/0", 1, 5)
		require.NoError(t, err)
		assert.Equal(t, "10.0.0.1", late.Addr, "in-process")
	}, "a", "b", "c")
}

func TestAwaitEndsWithItsContext(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.setLeader("b")
		why := errors.New("superseded")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(6*time.Second, func() { cancel(why) })
		_, err := w.nodes["a"].client.Await(ctx, "moe/0", 1, 4)
		require.ErrorIs(t, err, why)
		w.setLeader("nobody")
		began := time.Now()
		_, err = w.nodes["a"].client.Await(t.Context(), "moe/0", 1, 4)
		require.Error(t, err)
		assert.InDelta(t, persistLimit.Seconds(), time.Since(began).Seconds(), 1,
			"bounded even without a deadline")
	}, "a", "b")
}

func TestPublishWaitsForALeader(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		a, p := w.nodes["a"], msg.Publish{Unit: "moe/0", Epoch: 2, Addr: "new", Port: 2}
		a.client.Publish(p)
		time.Sleep(publishLimit / 2)
		l := w.setLeader("b")
		assert.Equal(t, p, <-l.published)
		time.Sleep(time.Minute)
		assert.Empty(t, l.published, "once")

		w.setLeader("nobody")
		for range maxPublished - 1 {
			a.client.publishing <- struct{}{}
		}
		a.client.Publish(p)
		a.client.Publish(p) // one too many
		assert.Len(t, a.client.publishing, maxPublished)
		time.Sleep(2 * publishLimit)
		assert.Len(t, a.client.publishing, maxPublished-1, "nobody waits so long")
		l = w.setLeader("a")
		a.client.Publish(p)
		assert.Equal(t, p, <-l.published, "in-process")
	}, "a", "b")
}

func TestProposalsOfFollowers(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		a := w.nodes["a"]
		put := state.Command{PutApps: &state.PutApps{Apps: []state.AppSpec{{
			Name: "chat", Spec: []byte(`{}`),
		}}, Expect: map[string]uint64{"chat": 0}}}
		_, err := a.client.Propose(t.Context(), put)
		require.ErrorIs(t, err, cluster.ErrNotLeader)
		w.setLeader("c")
		r, err := a.client.Propose(t.Context(), put)
		require.NoError(t, err)
		assert.Equal(t, map[string]uint64{"chat": 1}, r.Apps)
		_, err = a.client.Forward(t.Context(), *w.store.nodes()["b"], put)
		require.ErrorIs(t, err, state.ErrStaleRevision, "b names c, and c refuses")
		_, err = a.client.Propose(t.Context(),
			state.Command{Init: &state.Init{Cluster: "c", Secret: []byte("mine")}})
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		_, err = a.client.Propose(t.Context(), state.Command{
			RotateGossipKey: &state.RotateGossipKey{Next: []byte("mine")},
		})
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		_, err = a.client.Propose(t.Context(), state.Command{Init: &state.Init{Cluster: "c"}})
		require.NoError(t, err, "the name alone")
		_, err = a.client.Propose(t.Context(), state.Command{})
		require.ErrorIs(t, err, state.ErrUnknownCommand)

		_, err = a.client.Forward(t.Context(), state.Node{UID: "uid-of-a-newcomer"}, put)
		require.ErrorIs(t, err, state.ErrStaleRevision, "who leads is not in this node's copy yet")

		w.store.err = problem.New(problem.Unavailable, "propose: %w", cluster.ErrClosed)
		_, err = a.client.Propose(t.Context(), put)
		require.ErrorIs(t, err, cluster.ErrOutcomeUnknown)
		for _, m := range w.nodes {
			m.server.Stop()
		}
		time.Sleep(time.Second) // the connections are known to be gone
		_, err = a.client.Forward(t.Context(), *w.store.nodes()["c"], put)
		require.ErrorIs(t, err, errUnreachable)
		require.NotErrorIs(t, err, cluster.ErrOutcomeUnknown, "it was not sent")
	}, "a", "b", "c")
}

func TestWatchFollowsAnyControlNode(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		asked := map[string]int{}
		for name, m := range w.nodes {
			m.follow = func(ctx context.Context, from uint64, send func(*cluster.Update) error) error {
				asked[name]++
				assert.Equal(t, uint64(41), from)
				if err := errors.Join(send(&cluster.Update{Leader: "l", State: []byte("{}")}),
					send(&cluster.Update{Leader: "l"})); err != nil {
					return err
				}
				<-ctx.Done()
				return ctx.Err()
			}
		}
		enough := errors.New("enough")
		for range 4 {
			var seen []string
			ctx, stop := context.WithCancelCause(t.Context())
			err := w.nodes["a"].client.Watch(ctx, 41, func(u *cluster.Update) {
				if seen = append(seen, u.Leader+string(u.State)); len(seen) == 2 {
					stop(enough)
				}
			})
			require.ErrorIs(t, err, enough)
			assert.Equal(t, []string{"l{}", "l"}, seen)
		}
		synctest.Wait()
		assert.Equal(t, map[string]int{"b": 2, "c": 2}, asked)
		for _, m := range w.nodes {
			m.follow = func(context.Context, uint64, func(*cluster.Update) error) error { return nil }
		}
		require.ErrorIs(t, w.nodes["a"].client.Watch(t.Context(), 0, nil), errUnreachable, "it ended")
		for _, m := range w.nodes {
			m.follow = func(context.Context, uint64, func(*cluster.Update) error) error {
				return problem.New(problem.Unavailable, "propose: %w", cluster.ErrClosed)
			}
		}
		require.ErrorIs(t, w.nodes["a"].client.Watch(t.Context(), 0, nil), cluster.ErrClosed)
		w.nodes["b"].server.Stop()
		w.nodes["c"].server.Stop()
		time.Sleep(time.Second)
		require.ErrorIs(t, w.nodes["a"].client.Watch(t.Context(), 0, nil), errUnreachable)
	}, "a", "b", "c")
}

func TestWatchWithoutControlNodes(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		assert.Equal(t, problem.Unavailable, problem.CodeOf(w.nodes["a"].client.Watch(t.Context(), 0, nil)))
	}, "a")
}

// newCertificateRequest is a key with a certificate request.
func newCertificateRequest(t *testing.T) (key, csr []byte) {
	t.Helper()
	key, err := pki.NewKey()
	require.NoError(t, err)
	csr, err = pki.NewCSR(key)
	require.NoError(t, err)
	return key, csr
}

func TestCertify(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		key, csr := newCertificateRequest(t)
		own := identityNamed("worker")
		_, _, err := w.nodes["worker"].client.Certify(t.Context(), own, csr)
		require.EqualError(t, err, "certificate: this cluster has no certificate authority")
		authority := w.store.authority(t)
		cert, ca, err := w.nodes["worker"].client.Certify(t.Context(), own, csr)
		require.NoError(t, err, "no leader is needed")
		assert.Equal(t, authority, ca)
		c, err := pki.NewCredentials(ca, cert, key)
		require.NoError(t, err)
		assert.Equal(t, own, c.Identity)
		_, _, err = w.nodes["worker"].client.Certify(t.Context(), own, []byte("junk"))
		assert.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
		w.store.put(&state.Node{
			ID: "worker", UID: "another", Address: "worker:7947",
			Roles: []state.Role{state.RoleWorker},
		})
		_, _, err = w.nodes["worker"].client.Certify(t.Context(), own, csr)
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
	}, "worker", "b")
}

// A control node has the authority's key, and may be the only one: it signs for itself and needs no leader.
func TestTheOnlyControlNodeRenewsItsOwnCertificate(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		authority := w.store.authority(t)
		key, csr := newCertificateRequest(t)
		cert, ca, err := w.nodes["a"].client.Certify(t.Context(), identityNamed("a"), csr)
		require.NoError(t, err)
		assert.Equal(t, authority, ca)
		c, err := pki.NewCredentials(ca, cert, key)
		require.NoError(t, err)
		assert.Equal(t, identityNamed("a"), c.Identity)
	}, "a", "worker")
}

// HF21: a node renews its certificate for the key and the roles with which it has joined, and for no others.
func TestARenewedCertificateHasTheRolesAndTheKeyOfTheJoin(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.store.authority(t)
		_, csr := newCertificateRequest(t)
		_, other := newCertificateRequest(t)
		sum, err := pki.KeySum(csr)
		require.NoError(t, err)
		w.store.put(&state.Node{
			ID: "worker", UID: "uid-worker", Address: "worker:7947",
			Roles: []state.Role{state.RoleWorker}, Key: sum,
		})
		own := identityNamed("worker")
		_, _, err = w.nodes["worker"].client.Certify(t.Context(), own, csr)
		require.NoError(t, err)
		_, _, err = w.nodes["worker"].client.Certify(t.Context(), own, other)
		require.EqualError(t, err, "certificate: node worker has joined with another key")
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		w.store.put(&state.Node{
			ID: "worker", UID: "uid-worker", Address: "worker:7947",
			Roles: []state.Role{state.RoleControl}, Key: sum,
		})
		_, _, err = w.nodes["worker"].client.Certify(t.Context(), own, csr)
		require.ErrorIs(t, err, state.ErrRolesFixed)
		require.ErrorContains(t, err, "its certificate is for roles [worker], not [control]")
	}, "worker", "b")
}

// HF21: The certificate decides the roles: a report or a command of the node cannot change them.
func TestARenewalWithOtherRolesThanTheCertificatesIsRefused(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.setLeader("b")
		r := report("ingress")
		r.Node.Roles = []state.Role{state.RoleControl}
		_, err := w.nodes["ingress"].client.Renew(t.Context(), r)
		require.ErrorIs(t, err, state.ErrRolesFixed)
		assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err))
		r.Node.Roles = []state.Role{state.RoleIngress}
		_, err = w.nodes["ingress"].client.Renew(t.Context(), r)
		require.NoError(t, err)
	}, "a", "b", "ingress")
}

// HF21, HF73: a node without the role control changes neither nodes nor tokens.
func TestNodesWithoutRoleControlMakeNoMembers(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		w.setLeader("b")
		claim := state.Node{ID: "ingress", UID: "uid-ingress", Roles: []state.Role{state.RoleControl}}
		for _, c := range []state.Command{
			{PutNode: &state.PutNode{Node: claim}},
			{PutNode: &state.PutNode{Node: claim, AnyRoles: true}},
			{PutToken: &state.Token{Hash: "h", Expires: 1, Uses: 1}},
			{UseToken: &state.UseToken{Hash: "h", UID: "u", Now: 1}},
			{RevokeToken: &state.RevokeToken{All: true}},
		} {
			_, err := w.nodes["ingress"].client.Propose(t.Context(), c)
			assert.Equal(t, problem.PermissionDenied, problem.CodeOf(err), "%s: %v", c.Kind(), err)
		}
		_, err := w.nodes["a"].client.Propose(t.Context(),
			state.Command{PutNode: &state.PutNode{Node: claim, AnyRoles: true}})
		require.ErrorIs(t, err, state.ErrRolesFixed)
		_, err = w.nodes["a"].client.Propose(t.Context(),
			state.Command{PutToken: &state.Token{Hash: "h", Expires: 1, Uses: 1}})
		require.NoError(t, err)
	}, "a", "b", "ingress")
}

// authority gives the state a certificate authority.
func (s *fakeStore) authority(t *testing.T) []byte {
	t.Helper()
	a, err := pki.NewAuthority("c", time.Now().Add(-400*24*time.Hour))
	require.NoError(t, err)
	cert, key := a.PEM()
	s.change(func(st *state.State) {
		st.Secrets = state.Secrets{Authority: cert, AuthorityKey: key, GossipKey: make([]byte, 32)}
	})
	return cert
}

func TestConnsFollowTheNodes(t *testing.T) {
	withCluster(t, func(t *testing.T, w *testCluster) {
		a := w.nodes["a"].conns
		_, err := a.Get("x")
		require.ErrorIs(t, err, state.ErrUnknownNode)
		w.store.put(&state.Node{ID: "alone", UID: "u"})
		_, err = a.Get("alone")
		require.ErrorIs(t, err, errNoAddress)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		first, err := a.Get("b")
		require.NoError(t, err)
		again, err := a.Get("b")
		require.NoError(t, err)
		assert.Same(t, first, again)

		w.store.put(&state.Node{ID: "b", UID: "uid-b", Address: "elsewhere:1"})
		moved, err := a.Get("b")
		require.NoError(t, err)
		assert.NotSame(t, first, moved)
		require.ErrorIs(t, fromStatus("b", invoke(t.Context(), first, "/x/y", "{}")), errUnreachable,
			"it is closed")

		w.store.put(&state.Node{ID: "b", UID: "uid-b2", Address: "elsewhere:1"})
		_, err = a.Get("b")
		require.NoError(t, err)
		assert.Equal(t, "uid-b2", a.open["b"].uid)
		w.store.change(func(st *state.State) { st.Nodes = nil })
		_, err = a.Get("b")
		require.ErrorIs(t, err, state.ErrUnknownNode)
		assert.Empty(t, a.open)
		require.NoError(t, a.Close())
		_, err = a.Get("b")
		require.ErrorIs(t, err, errUnreachable)
	}, "a", "b")
}

func TestConnsReportAFailedDial(t *testing.T) {
	c := NewConns(ConnsConfig{
		Dial:  func(string, string) (*grpc.ClientConn, error) { return nil, errors.New("bad address") },
		Nodes: func() map[string]*state.Node { return map[string]*state.Node{"b": {ID: "b", Address: "?"}} },
	})
	_, err := c.Get("b")
	require.ErrorIs(t, err, errUnreachable)
	require.EqualError(t, c.Node("b").StopRank(t.Context(), &msg.StopRank{Unit: "chat/0"}),
		"node b cannot be reached: bad address")
}
