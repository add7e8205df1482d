package dpserver

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/actors/msg"
)

// checkShares checks after every step: not more room is held than is free, and not more is offered than is
// held.
func checkShares(t *rapid.T, s *fairShare, free int) {
	held := 0
	for _, p := range s.places {
		require.True(t, 0 <= p.offered && p.offered <= p.held && p.need >= 1, "%+v", p)
		held += p.held
	}
	require.Equal(t, held, s.held)
	require.LessOrEqual(t, held, free)
	require.LessOrEqual(t, len(s.places), maxPlaces)
}

// RP6, RP10: whatever the ingresses do, room is refused only if it is taken or held for another ingress, and
// held room is taken or free again after a bounded time.
func TestLawOfTurns(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s fairShare
		room := rapid.IntRange(1, 8).Draw(t, "room")
		free, open, now := room, []int{}, time.Unix(1000, 0)
		names := []string{"a", "b", "c", "d"}
		for range rapid.IntRange(1, 120).Draw(t, "length") {
			who := rapid.SampledFrom(names).Draw(t, "ingress")
			switch rapid.IntRange(0, 6).Draw(t, "step") {
			case 0, 1:
				need := rapid.IntRange(1, room).Draw(t, "need")
				others := 0
				for _, p := range s.places {
					if p.ingress != who {
						others += p.held
					}
				}
				granted := s.canUse(who, need, free)
				require.Equal(t, need <= free-others, granted)
				if !granted {
					s.addWait(now, who, need)
					break
				}
				free, open = free-need, append(open, need)
				s.useRoom(now, who, need)
			case 2:
				if len(open) > 0 {
					free, open = free+open[0], open[1:]
				}
			case 3:
				s.addWait(now, who, 0)
			case 4:
				s.removeWait(who)
			case 5:
				now = now.Add(time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond)
				s.expireOffers(now)
			case 6:
				s.releaseAll()
			}
			checkShares(t, &s, free)
			for range room {
				to := s.offerRoom(now, free)
				checkShares(t, &s, free)
				require.True(t, to == "" || s.canUse(to, 1, free), "who has the offer may take it")
			}
			require.False(t, s.canOffer(now, free), "free room is held as long as an ingress waits")
		}
		if at, ok := s.nextExpiry(); ok {
			require.LessOrEqual(t, at.Sub(now), waitLife)
		} else {
			require.Zero(t, s.held)
		}
		s.expireOffers(now.Add(waitLife))
		require.Zero(t, s.held, "no room is kept")
	})
}

func TestLawTheOnlyIngressIsNeverHeldUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s fairShare
		room := rapid.IntRange(1, 8).Draw(t, "room")
		free, now := room, time.Unix(1000, 0)
		for range rapid.IntRange(1, 80).Draw(t, "length") {
			switch rapid.IntRange(0, 3).Draw(t, "step") {
			case 0:
				need := rapid.IntRange(1, room).Draw(t, "need")
				granted := s.canUse("a", need, free)
				require.Equal(t, need <= free, granted)
				if granted {
					free -= need
					s.useRoom(now, "a", need)
				} else {
					s.addWait(now, "a", need)
				}
			case 1:
				free = min(free+1, room)
			case 2:
				s.addWait(now, "a", 0)
			default:
				now = now.Add(time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond)
				s.expireOffers(now)
			}
			s.offerRoom(now, free)
			checkShares(t, &s, free)
		}
	})
}

// RP6: ingresses that wait all the time get equally many offers, however late they take them.
func TestLawTurnsAreEqual(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s fairShare
		k, room := rapid.IntRange(2, 6).Draw(t, "ingresses"), rapid.IntRange(1, 8).Draw(t, "room")
		now, free := time.Unix(1000, 0), 0
		count, owed := map[string]int{}, []string{}
		for range rapid.IntRange(50, 200).Draw(t, "steps") {
			now = now.Add(10 * time.Millisecond)
			for i := range k {
				s.addWait(now, strconv.Itoa(i), 0)
			}
			if free < room && rapid.Bool().Draw(t, "freed") {
				free++
			}
			if to := s.offerRoom(now, free); to != "" {
				count[to]++
				owed = append(owed, to)
			}
			for len(owed) > 0 && rapid.Bool().Draw(t, "taken") {
				i := rapid.IntRange(0, len(owed)-1).Draw(t, "who")
				require.True(t, s.canUse(owed[i], 1, free))
				s.useRoom(now, owed[i], 1)
				free--
				owed = append(owed[:i], owed[i+1:]...)
			}
			for _, p := range s.places {
				if p.offered > 0 && now.Sub(p.offerEnds) > -50*time.Millisecond { // in time
					for i := len(owed) - 1; i >= 0; i-- {
						if owed[i] == p.ingress {
							s.useRoom(now, p.ingress, 1)
							free--
							owed = append(owed[:i], owed[i+1:]...)
						}
					}
				}
			}
			checkShares(t, &s, free)
		}
		least, most := 1<<30, 0
		for i := range k {
			n := count[strconv.Itoa(i)]
			least, most = min(least, n), max(most, n)
		}
		require.LessOrEqual(t, most-least, 1, "%v", count)
	})
}

func (r *testRig) askFor(ingress string) msg.AdmitReply {
	r.t.Helper()
	return r.ask(func(a *msg.Admit) { a.Ingress = ingress })
}

// lastRecord is the last record, which must be a RecDone or a RecState.
func (r *testRig) lastRecord() msg.Record {
	got := r.tape.take()
	require.NotEmpty(r.t, got)
	return got[len(got)-1]
}

func TestFreedRoomIsHeldForTheIngressThatWaits(t *testing.T) {
	withRank(t, 1, true, func(t *testing.T, r *testRig) {
		first := r.askFor("near")
		require.Equal(t, msg.Granted, first.Refusal)
		require.Equal(t, msg.Full, r.askFor("far").Refusal)
		r.send(&msg.Done{TicketID: first.Ticket.ID})
		assert.Equal(t, "far", r.lastRecord().OfferedTo)
		require.Equal(t, msg.Full, r.askFor("near").Refusal, "it is offered to another")
		second := r.askFor("far")
		require.Equal(t, msg.Granted, second.Refusal)
		require.Equal(t, msg.Full, r.askFor("far").Refusal)
		r.send(&msg.Done{TicketID: second.Ticket.ID})
		assert.Equal(t, "far", r.lastRecord().OfferedTo, "the other came when it had its offer already")
		third := r.askFor("far")
		r.send(&msg.Done{TicketID: third.Ticket.ID})
		assert.Equal(t, "near", r.lastRecord().OfferedTo)
		require.Equal(t, msg.Granted, r.askFor("near").Refusal)
	})
}

// RP6: capacity that was offered to an ingress which is dead, or needs it no more, is offered to the next.
func TestATurnThatIsNotTakenPassesOn(t *testing.T) {
	wait := func(r *testRig, ingress string,
		waits bool,
	) {
		r.send(msg.Demand{Ingress: ingress, Waits: waits})
	}
	setUp := func(t *testing.T, r *testRig) {
		first := r.askFor("near")
		wait(r, "dead", true)
		wait(r, "far", true)
		r.send(&msg.Done{TicketID: first.Ticket.ID})
		require.Equal(t, "dead", r.lastRecord().OfferedTo)
		require.Equal(t, msg.Full, r.askFor("far").Refusal)
	}
	t.Run("it is dead", func(t *testing.T) {
		withRank(t, 1, true, func(t *testing.T, r *testRig) {
			setUp(t, r)
			time.Sleep(offerLife + time.Millisecond)
			synctest.Wait()
			rec := r.lastRecord()
			assert.Equal(t, [...]any{msg.RecState, true, "far"},
				[...]any{rec.Kind, rec.Accepting, rec.OfferedTo})
			wait(r, "dead", true)
			second := r.askFor("far")
			require.Equal(t, msg.Granted, second.Refusal)
			r.send(&msg.Done{TicketID: second.Ticket.ID})
			assert.Equal(t, "far", r.lastRecord().OfferedTo, "the other one is not waited for again so soon")
		})
	})
	t.Run("it says so", func(t *testing.T) {
		withRank(t, 1, true, func(t *testing.T, r *testRig) {
			setUp(t, r)
			wait(r, "dead", false)
			assert.Equal(t, "far", r.lastRecord().OfferedTo)
			wait(r, "far", false)
			assert.Empty(t, r.lastRecord().OfferedTo)
			require.Equal(t, msg.Granted, r.askFor("near").Refusal)
		})
	})
	t.Run("another incarnation", func(t *testing.T) {
		withRank(t, 1, true, func(t *testing.T, r *testRig) {
			setUp(t, r)
			require.NoError(t, r.Ready(t.Context(), msg.Facts{Incarnation: 8, MaxOngoing: 1}))
			require.Equal(t, msg.Granted, r.askFor("near").Refusal)
		})
	})
	t.Run("a drain", func(t *testing.T) {
		withRank(t, 1, true, func(t *testing.T, r *testRig) {
			setUp(t, r)
			r.Drain("asked")
			synctest.Wait()
			assert.Empty(t, r.lastRecord().OfferedTo)
			time.Sleep(time.Second)
			synctest.Wait()
			assert.Empty(t, r.tape.take(), "nobody is told of room")
		})
	})
}

func TestABusyEngineHoldsNoRoom(t *testing.T) {
	withRank(t, 1, true, func(t *testing.T, r *testRig) {
		a := r.askFor("near")
		r.send(msg.Demand{Ingress: "far", Waits: true})
		r.send(&msg.Done{TicketID: a.Ticket.ID, BusyFor: time.Second, Outcome: msg.FailedOutcome})
		require.Equal(t, msg.Full, r.askFor("far").Refusal)
		time.Sleep(time.Second + time.Millisecond)
		synctest.Wait()
		assert.Equal(t, "far", r.lastRecord().OfferedTo, "it is offered again when the engine takes requests")
		require.Equal(t, msg.Granted, r.askFor("far").Refusal)
	})
}

// RP10: requests with `n` and lists of prompts, more than a rank has room for, beside others; `/tokenize`
// beside a full rank; an engine above busy_threshold whose metrics then do not answer: They count as n ×
// prompts, at most as the whole rank, and get their offer; 400 above 1,024; tokenizing takes no place;
// after five missed reports the rank is judged by its own account.
func TestSequencesWeigh(t *testing.T) {
	weigh := func(r *testRig, ingress string, n int) msg.AdmitReply {
		return r.ask(func(a *msg.Admit) { a.Ingress, a.Weight = ingress, n })
	}
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		three := weigh(r, "a", 3)
		require.Equal(t, msg.Granted, three.Refusal)
		require.Equal(t, msg.Full, weigh(r, "a", 2).Refusal, "it has room for one")
		one := weigh(r, "a", 0)
		require.Equal(t, msg.Granted, one.Refusal)
		require.Equal(t, msg.Full, weigh(r, "b", 1000).Refusal)
		require.Equal(t, msg.Full, weigh(r, "a", 1).Refusal)
		r.send(msg.Demand{Ingress: "b", Waits: true})
		r.send(msg.Demand{Ingress: "a", Waits: false})
		r.send(&msg.Done{TicketID: one.Ticket.ID})
		assert.Equal(t, offeredToNone, r.lastRecord().OfferedTo, "one place is not enough for it")
		require.Equal(t, msg.Full, weigh(r, "a", 1).Refusal, "places are collected")
		r.send(&msg.Done{TicketID: three.Ticket.ID})
		assert.Equal(t, "b", r.lastRecord().OfferedTo)
		heavy := weigh(r, "b", 1000)
		require.Equal(t, msg.Granted, heavy.Refusal, "it counts as all there is")
		require.Equal(t, msg.Full, weigh(r, "a", 1).Refusal)
		r.send(msg.Demand{Ingress: "b", Waits: false})
		r.send(&msg.Done{TicketID: heavy.Ticket.ID})
		require.Equal(t, msg.Granted, weigh(r, "a", 4).Refusal, "all its room is free again")
	})
}

// RP10: a rank stops collecting capacity for a heavy request when that request went elsewhere.
func TestCollectingEndsWithTheRequestThatItIsFor(t *testing.T) {
	withRank(t, 4, true, func(t *testing.T, r *testRig) {
		require.Equal(t, msg.Granted, r.askFor("a").Refusal)
		require.Equal(t, msg.Full, r.ask(func(m *msg.Admit) { m.Ingress, m.Weight = "b", 4 }).Refusal)
		r.send(&msg.Done{TicketID: 99})
		require.Equal(t, msg.Granted, r.askFor("a").Refusal, "nothing is held before room is freed")
		r.send(&msg.Done{TicketID: 1})
		require.Equal(t, msg.Full, r.askFor("a").Refusal)
		time.Sleep(refusedLife + time.Millisecond)
		synctest.Wait()
		assert.Empty(t, r.lastRecord().OfferedTo)
		require.Equal(t, msg.Granted, r.askFor("a").Refusal, "it went elsewhere")
	})
}
