package node

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/internal/state"
)

func TestEventsGoOutAtOnceAndTheLeaseIsRenewed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		assert.Equal(t, 1, b.leader.renewals(), "at once")
		assert.Equal(t, 10*time.Second, b.node.LeaseLeft())
		b.serving("demo/0/0", 3)
		assert.Equal(t, []string{"3:started", "3:ready"}, b.leader.kinds("demo/0/0"))
		r := b.leader.last()
		assert.Equal(t, "n", r.Node.ID)
		assert.Equal(t, 8, r.Node.Resources.Slots)
		assert.NotZero(t, r.Incarnation)
		assert.Equal(t, b.store.State().Index, r.Index)
		before := b.leader.renewals()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		assert.Equal(t, 10, b.leader.renewals()-before)
		r = b.leader.last()
		assert.Empty(t, r.Events)
		require.Len(t, r.Units, 1)
		assert.Equal(t, msg.UnitReady, r.Units[0].Kind)
		assert.True(t, b.node.Admits())
		assert.Nil(t, b.node.Serves())
	})
}

func TestWithoutALeaseNothingStartsAndWhatRunsIsServed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		began := b.leader.lastBegan()
		b.leader.becomes(silent)
		time.Sleep(time.Until(began.Add(9*time.Second - time.Millisecond)))
		require.NoError(t, b.node.leaseKeeper.mayLaunch())
		time.Sleep(time.Millisecond)
		launched := b.launched()
		err := b.start("demo/0/1", 1)
		require.ErrorIs(t, err, errNoLease)
		assert.Equal(t, problem.Unavailable, problem.CodeOf(err))
		time.Sleep(time.Hour)
		assert.Equal(t, launched, b.launched())
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
		assert.True(t, b.node.Admits())
		assert.Zero(t, b.node.LeaseLeft())
		b.leader.becomes(leaderless)
		time.Sleep(time.Minute)
		b.leader.becomes(nil)
		before := time.Now()
		defer func() { assert.Zero(t, time.Since(before)) }()
		require.NoError(t, b.start("demo/0/1", 1),
			"an order of a leader makes the node ask at once; the refused epoch is not spent")
	})
}

// The leader of the lease may have released what an earlier leader still orders. A copy that does not catch
// up does not keep a unit from starting.
func TestStartWaitsForTheCopyToCatchUpWithTheLease(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		first := b.order("demo/0/0", 1)
		var released atomic.Uint64
		released.Store(b.store.State().Index + 1)
		b.leader.becomes(func(_ context.Context, r *msg.NodeReport) (msg.Lease, error) {
			l := b.leader.grant(r)
			l.Index = released.Load()
			return l, nil
		})
		time.Sleep(3 * time.Second)
		go func() {
			time.Sleep(100 * time.Millisecond)
			b.store.change(func(s *state.State) { s.Epochs["demo/0/0"] = 2 })
		}()
		require.ErrorIs(t, b.node.StartRank(t.Context(), first), ErrStaleEpoch)
		second := b.order("demo/0/0", 2)
		began := time.Now()
		require.NoError(t, b.node.StartRank(t.Context(), second))
		assert.Zero(t, time.Since(began))
		b.order("other/0/0", 1)
		released.Store(b.store.State().Index + 2)
		time.Sleep(3 * time.Second)
		began = time.Now()
		require.NoError(t, b.start("other/0/0", 1))
		assert.Equal(t, copyWait, time.Since(began))
	})
}

func TestRetriesFindTheNextLeaderWithinASecond(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.leader.becomes(leaderless)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		n := b.leader.renewals()
		assert.InDelta(t, 30, n, 5, "each second, and more often at first")
		b.leader.becomes(nil)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Positive(t, b.node.LeaseLeft())
	})
}

// MB3: with `on_lease_loss: fence` a node that hears of no leader has ended its units before their grants can
// go to others.
func TestMB3FenceEndsAllBeforeTheLeaderGrantsItElsewhere(t *testing.T) {
	inBubble(t, func(c *Config) { c.OnLeaseLoss = Fence }, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		attach := b.order("other/0/0", 1)
		attach.App, attach.Block = testApp(app.KindAttach, app.Independent, 1), state.Block{}
		require.NoError(t, b.node.StartRank(t.Context(), attach))
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, state.Ready, b.phase("other/0/0"))
		serves := b.node.Serves()
		require.True(t, serves())
		synctest.Wait()
		began := b.leader.lastBegan()
		b.leader.becomes(silent)
		time.Sleep(time.Until(began.Add(9*time.Second - time.Millisecond)))
		synctest.Wait()
		assert.True(t, b.node.Admits())
		assert.True(t, serves())
		time.Sleep(time.Millisecond)
		assert.False(t, b.node.Admits())
		assert.False(t, serves())
		synctest.Wait()
		for _, unit := range []string{"demo/0/0", "other/0/0"} {
			cause, at := b.replica(unit, 1, 0).fenced()
			assert.Equal(t, "lease_lost", cause)
			assert.Equal(t, 9*time.Second, at.Sub(began))
		}
		time.Sleep(2 * time.Second)
		assert.Equal(t, state.Gone, b.phase("demo/0/0"))
		assert.Equal(t, state.Gone, b.phase("other/0/0"), "an attached rank does not come back by itself")
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.True(t, b.node.Admits())
		assert.Equal(t, "lease_lost", b.leader.reason("demo/0/0"))
		require.NoError(t, b.start("demo/0/0", 2))
	})
}

// Neither the grace of other stops nor an earlier stop keeps an engine alive after its unit may run
// elsewhere.
func TestABusyEngineIsKilledInTime(t *testing.T) {
	for name, asked := range map[string]bool{"serving": false, "ending already": true} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(c *Config) { c.OnLeaseLoss = Fence }, func(t *testing.T, b *bubble) {
				b.serving("demo/0/0", 1)
				b.busy.Store(true)
				synctest.Wait()
				began := b.leader.lastBegan()
				b.leader.becomes(silent)
				time.Sleep(time.Until(began.Add(8 * time.Second)))
				if asked {
					require.NoError(t, b.node.StopRank(t.Context(), &msg.StopRank{
						Unit: "demo/0/0", Epoch: 1, Grace: time.Minute, Reason: "drain",
					}))
				}
				time.Sleep(time.Until(began.Add(9*time.Second + 400*time.Millisecond)))
				assert.NotEqual(t, state.Gone, b.phase("demo/0/0"), "SIGTERM comes first")
				time.Sleep(600 * time.Millisecond)
				assert.Equal(t, state.Gone, b.phase("demo/0/0"))
			})
		})
	}
}

// The node admits nothing between the thaw and the end of one renewal, whatever its result.
func TestMB3AThawedNodeAsksFirst(t *testing.T) {
	for _, mode := range []LeaseLoss{Serve, Fence} {
		for name, granted := range map[string]bool{"granted": true, "refused": false} {
			t.Run(string(mode)+" "+name, func(t *testing.T) {
				inBubble(t, func(c *Config) { c.OnLeaseLoss = mode }, func(t *testing.T, b *bubble) {
					b.serving("demo/0/0", 1)
					thaw := b.store.freeze()
					time.Sleep(15 * time.Second)
					assert.False(t, b.node.Admits(), "also for who comes before anybody has noticed")
					if mode == Fence {
						assert.False(t, b.node.Serves()())
					}
					answer := make(chan struct{})
					b.leader.becomes(func(ctx context.Context, r *msg.NodeReport) (msg.Lease, error) {
						select {
						case <-answer:
						case <-ctx.Done(): // a renewal that began before the freeze
							return msg.Lease{}, context.Cause(ctx)
						}
						if !granted {
							return leaderless(ctx, r)
						}
						return b.leader.grant(r), nil
					})
					thaw()
					synctest.Wait()
					time.Sleep(500 * time.Millisecond)
					assert.False(t, b.node.Admits())
					cause, _ := b.replica("demo/0/0", 1, 0).fenced()
					if mode == Fence {
						assert.Equal(t, "lease_lost", cause)
					} else {
						assert.Empty(t, cause)
					}
					close(answer)
					// the renewal under way at the freeze does not count
					time.Sleep(200 * time.Millisecond)
					synctest.Wait()
					assert.Equal(t, granted || mode == Serve, b.node.Admits())
				})
			})
		}
	}
}

// RG3: a unit that the replicated state shows granted anew or released ends at once.
func TestRG3WhatTheStateShowsSupersededStopsAtOnce(t *testing.T) {
	for name, change := range map[string]func(s *state.State){
		"granted anew": func(s *state.State) {
			s.Epochs["demo/0/0"]++
			s.Units["demo/0/0"] = &state.Unit{ID: "demo/0/0", Epoch: 2}
		},
		"released": func(s *state.State) { delete(s.Units, "demo/0/0") },
		"granted anew and released": func(s *state.State) {
			s.Epochs["demo/0/0"] = 5
			delete(s.Units, "demo/0/0")
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, b *bubble) {
				b.serving("demo/0/0", 1)
				b.serving("demo/0/1", 1)
				b.leader.becomes(silent) // no lease is needed for it
				time.Sleep(time.Minute)
				began := time.Now()
				b.store.change(change)
				synctest.Wait()
				cause, at := b.replica("demo/0/0", 1, 0).fenced()
				assert.Equal(t, causeSuperseded, cause)
				assert.Less(t, at.Sub(began), time.Second)
				time.Sleep(2 * time.Second)
				assert.Empty(t, b.phase("demo/0/0"), "gone and forgotten")
				assert.Equal(t, state.Ready, b.phase("demo/0/1"))
				b.leader.becomes(nil)
				time.Sleep(3 * time.Second)
				synctest.Wait()
				assert.Equal(t, []string{"1:started", "1:ready", "1:killing", "1:gone"},
					b.leader.kinds("demo/0/0"))
				assert.Equal(t, "superseded", b.leader.reason("demo/0/0"))
				require.Len(t, b.leader.last().Units, 1, "the digest holds what the cluster knows")
				m := b.order("x", 1)
				m.Unit = "demo/0/0"
				err := b.node.StartRank(t.Context(), m)
				require.ErrorIs(t, err, ErrStaleEpoch, "a late order")
			})
		})
	}
}

func TestACopyOfTheStateThatLagsEndsNothing(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0/0", 7)
		b.store.change(func(s *state.State) {
			s.Epochs["demo/0/0"] = 6
			delete(s.Units, "demo/0/0")
		})
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(time.Minute)
		assert.Equal(t, state.Ready, b.phase("demo/0/0"))
	})
}

// A unit that waits for its rendezvous while the lease ends does not start its engines afterwards.
func TestALeaseThatEndsWhileAUnitWaits(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 1)
		m.App = testApp(app.KindSim, app.Lockstep, 3)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "m"}, {Rank: 1, Node: "n"}, {Rank: 2, Node: "n"}}
		m.Ranks = m.AllRanks[1:]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		b.leader.becomes(silent)
		time.Sleep(19 * time.Second)
		assert.Equal(t, state.Starting, b.phase("demo/0"))
		b.answer("10.0.0.7", 20010)
		time.Sleep(time.Second)
		assert.Zero(t, b.launched())
		assert.Equal(t, state.Gone, b.phase("demo/0"))
		b.leader.becomes(nil)
		time.Sleep(2 * time.Second)
		assert.Equal(t, "node n: no lease: it may start no engines", b.leader.reason("demo/0"))
	})
}

func TestARendezvousThatComesAndOneThatDoesNot(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		start := func(epoch uint64) {
			m := b.order("demo/0", epoch)
			m.App = testApp(app.KindSim, app.Lockstep, 3)
			m.AllRanks = []state.RankGrant{{Rank: 0, Node: "m"}, {Rank: 1, Node: "n"}, {Rank: 2, Node: "n"}}
			m.Ranks = m.AllRanks[1:]
			require.NoError(t, b.node.StartRank(t.Context(), m))
		}
		start(1)
		time.Sleep(121 * time.Second)
		assert.Empty(t, b.leader.reason("demo/0"), "the RankAssigner's own deadline comes first")
		time.Sleep(15 * time.Second)
		assert.Contains(t, b.leader.reason("demo/0"), errNobody.Error())
		assert.Equal(t, map[int]bool{1: true, 2: true}, b.asked,
			"each rank reports, so that the missing ones can be named")
		assert.Zero(t, b.launched())
		b.answer("10.0.0.7", 20010) // rank 0 is of a version that does not tell its settings
		start(2)
		time.Sleep(DefaultProbe + time.Second)
		assert.Equal(t, state.Ready, b.phase("demo/0"))
		require.Equal(t, 2, b.launched())
		for _, l := range b.launches {
			assert.Subset(t, l.Argv, []string{
				"--data-parallel-address", "10.0.0.7",
				"--data-parallel-rpc-port", "20010",
			})
			assert.Equal(t, b.launches[0].Env, l.Env, "one secret for all")
			assert.Contains(t, strings.Join(l.Env, " "), engine.GroupKeyVar)
		}
		assert.Empty(t, b.published())
	})
}

func TestRankZeroIsPublishedAgainWhileTheUnitStarts(t *testing.T) {
	var slow chan struct{}
	inBubble(t, func(c *Config) {
		slow = make(chan struct{})
		c.Advertise = "10.0.0.7"
		inner := c.Transport
		c.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
			select {
			case <-slow:
				return inner.RoundTrip(r)
			case <-r.Context().Done():
				return nil, r.Context().Err()
			}
		})
	}, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 4)
		m.App = testApp(app.KindSim, app.Lockstep, 2)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "n"}, {Rank: 1, Node: "m"}}
		m.Ranks = m.AllRanks[:1]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(9 * time.Second)
		want := msg.Publish{Unit: "demo/0", Epoch: 4, Rank: 0, Addr: "10.0.0.7", Port: 20010}
		assert.Equal(t, []msg.Publish{want, want, want, want, want}, b.published(),
			"a new leader knows of none")
		close(slow)
		time.Sleep(time.Minute)
		assert.Equal(t, state.Ready, b.phase("demo/0"))
		want.Settings = "model demo, max_model_len 2048 and block size 0"
		require.Len(t, b.published(), 6, "nothing after the start")
		assert.Equal(t, want, b.published()[5])
	})
}

func TestAUnitOverNodesNeedsAnAddressThatOthersKnow(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		m := b.order("demo/0", 1)
		m.App = testApp(app.KindSim, app.Lockstep, 2)
		m.AllRanks = []state.RankGrant{{Rank: 0, Node: "n"}, {Rank: 1, Node: "m"}}
		m.Ranks = m.AllRanks[:1]
		require.NoError(t, b.node.StartRank(t.Context(), m))
		time.Sleep(time.Second)
		assert.Equal(t,
			"ranks of demo/0 on other nodes cannot reach rank 0: node n has no address that others know",
			b.leader.reason("demo/0"))
	})
}

type roundTripper func(r *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestRenewAsksAtOnceAndOnlyOnce(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.leader.becomes(leaderless)
		time.Sleep(time.Minute)
		before, now := b.leader.renewals(), time.Now()
		b.node.Renew(t.Context())
		assert.Zero(t, time.Since(now))
		b.leader.becomes(nil)
		b.node.Renew(t.Context())
		assert.Zero(t, time.Since(now))
		assert.Equal(t, before+2, b.leader.renewals())
		assert.Equal(t, 10*time.Second, b.node.LeaseLeft())
		b.leader.becomes(silent)
		b.node.Renew(t.Context())
		assert.Equal(t, time.Second, time.Since(now), "one renewal's deadline")
	})
}

func TestTheLastEventsLeaveWithTheNode(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, b *bubble) {
		b.serving("demo/0/0", 1)
		require.NoError(t, b.node.Close(t.Context(), 0))
		assert.Equal(t, []string{"1:started", "1:ready", "1:killing", "1:gone"}, b.leader.kinds("demo/0/0"))
		b.leader.becomes(silent)
		require.Error(t, b.start("demo/0/0", 2), "a closed node refuses at once")
	})
}

// A part without requests of a unit over two nodes ends when the leader orders it, at the end of its grace,
// or with the lease of a node that stops. A unit of this node alone ends at once.
func TestAPartWithoutRequestsWaitsForTheOthers(t *testing.T) {
	for name, c := range map[string]struct {
		spans bool
		order time.Duration // from the leader, after so long; 0: none
		stops bool
		ends  time.Duration
	}{
		"alone":             {false, 0, false, 0},
		"ordered":           {true, 3 * time.Second, false, 3 * time.Second},
		"no leader":         {true, 0, false, 20 * time.Second},
		"no leader, a stop": {true, 0, true, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, b *bubble) {
				o := b.order("demo/0", 1)
				o.App.GracefulShutdownTimeout = 20
				if c.spans {
					o.AllRanks = append(o.AllRanks, state.RankGrant{Rank: 1, Node: "m"})
				}
				require.NoError(t, b.node.StartRank(t.Context(), o))
				time.Sleep(time.Second)
				require.Equal(t, state.Ready, b.phase("demo/0"))
				done, began := b.node.list()[0].done, time.Now()
				stop := func(grace time.Duration) {
					require.NoError(t, b.node.StopRank(t.Context(),
						&msg.StopRank{Unit: "demo/0", Epoch: 1, Grace: grace}))
				}
				stop(20 * time.Second)
				time.Sleep(c.order)
				synctest.Wait()
				b.leader.becomes(leaderless)
				if c.order > 0 {
					stop(0)
				}
				if c.stops {
					require.NoError(t, b.node.Close(t.Context(), time.Hour))
				}
				<-done
				assert.Equal(t, c.ends, time.Since(began).Truncate(time.Second))
				assert.Equal(t, c.spans, slices.Contains(b.leader.kinds("demo/0"), "1:idle"))
			})
		})
	}
}
