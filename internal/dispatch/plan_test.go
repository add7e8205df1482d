package dispatch

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/routing"
)

// script plays events, written as words, against a Plan and keeps the commands as words. Ranks are p1, p2, …
// and d1, d2, …; an event of a leg or a reservation names its rank.
type script struct {
	t       *testing.T
	plan    Plan
	watch   Watch
	now     time.Duration
	numbers map[string]uint32 // by rank: the number that it was reserved or started with last
	pick    uint32
	out     []string

	isLockstep bool
}

func testConfig(o Order) Config {
	return Config{
		Order: o, Lease: 30 * time.Second, PrefillLimit: 10 * time.Second, DecodeLimit: 5 * time.Second,
		LocalLimit: 10 * time.Second, Attempts: 3, Refusals: 4,
	}
}

func newScript(t *testing.T, cfg Config) *script {
	s := &script{t: t, numbers: map[string]uint32{}}
	s.plan.Begin(&cfg, false)
	return s
}

func rankOf(t require.TestingT, name string) routing.RankRef {
	n, err := strconv.Atoi(name[1:])
	require.NoError(t, err)
	return routing.RankRef{ID: routing.ID(0, n), Incarnation: 1}
}

func nameOf(s Side, r routing.RankRef) string {
	if r == (routing.RankRef{}) {
		return ""
	}
	return [...]string{"p", "d"}[s] + strconv.Itoa(r.ID.Rank())
}

// kindOf are the words for events, beside those for causes.
var kindOf = map[string]EventKind{
	"tick": EvTick, "start": EvStart, "chosen": EvPicked, "local": EvPicked, "fallback": EvPicked,
	"none": EvNoRank, "waited": EvNoRank, "reserved": EvReserved, "refused": EvRefused, "sent": EvSent,
	"first": EvContent, "says": EvAnswered, "fenced": EvFenced, "gone": EvClientGone, "deadline": EvDeadline,
}

// causeOf are the words for causes: short ones, and those of the table.
func causeOf(t require.TestingT, word string) Cause {
	short := map[string]Cause{
		"done": OK, "late": TooLate, "nodial": ConnRefused, "rejected": Passed, "busy": Busy,
		"error": EngineError, "cut": Reset,
	}
	if c, ok := short[word]; ok {
		return c
	}
	for c := range Causes {
		if Causes[c].Name == word {
			return Cause(c)
		}
	}
	require.Fail(t, "no event and no cause", word)
	return OK
}

// play plays lines of events, separated by semicolons.
func (s *script) play(events string) {
	for _, line := range strings.Split(events, ";") {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "at" { // the process runs until then; "frozen": it stands still
			to, err := time.ParseDuration(words[1])
			require.NoError(s.t, err)
			for s.now < to && len(words) == 2 {
				s.step(Event{}, min(to-s.now, WatchPeriod))
			}
			s.now = to
			continue
		}
		s.step(s.event(words), 0)
	}
}

// event reads words: what happens, the rank, and numbers. A refusal and an answer name their cause, and a leg
// that ends is named by it. A word of other kind is a flag.
func (s *script) event(words []string) Event {
	kind, ok := kindOf[words[0]]
	ev := Event{Kind: kind, Number: s.pick, IsRemote: words[0] == "chosen", Fallback: words[0] == "fallback"}
	ev.HasWaited = words[0] == "waited"
	switch {
	case !ok:
		ev.Kind, ev.Cause = EvEnded, causeOf(s.t, words[0])
	case kind == EvRefused:
		ev.Cause = NoLease
	}
	for _, w := range words[1:] {
		n, err := strconv.ParseUint(w, 10, 64)
		switch _, isRank := ranksOf[w]; {
		case err == nil:
			ev.Params, ev.Text = n, n
		case isRank && w[0] == 'p':
			ev.Prefill, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Prefill
		case isRank:
			ev.Decode, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Decode
		case w == "failed":
			ev.EngineFailed = true
		case w == "lost":
			ev.IsLost = true
		default:
			ev.Cause = causeOf(s.t, w)
		}
		if n, ok := s.numbers[w]; ok && kind != EvPicked {
			ev.Number = n
		}
	}
	if ev.Unit = uint64(ev.Side)<<8 + uint64(ev.Rank.ID.Rank()); s.isLockstep {
		ev.Unit = 1
	}
	return ev
}

// ranksOf are the names of ranks.
var ranksOf = map[string]bool{
	"p1": true, "p2": true, "p3": true, "p4": true, "p9": true,
	"d1": true, "d2": true, "d3": true, "d4": true, "d5": true,
}

func (s *script) step(ev Event, after time.Duration) {
	s.now += after
	for _, cmd := range s.plan.Step(s.watch.At(s.now), &ev) {
		s.out = append(s.out, s.words(&cmd))
	}
}

var (
	answerNames = [...]string{
		"none", "words", "own", "no-rank", "no-prefill", "two-died", "deadline", "lost",
	}
	wayNames    = [...]string{"none", "remote", "local", "fallback"}
	resultNames = [...]string{"ok", "rejected", "failed", "lost", "deadline", "gone"}
	noteNames   = [...]string{
		"redo", "prefill-failed", "null-params", "params-late", "kv-failure", "decode-late", "fallback",
		"stood-still",
	}
)

func (s *script) words(c *Command) string {
	rank := nameOf(c.Side, c.Rank)
	switch c.Kind {
	case CmdPick:
		s.pick = c.Number
		out := "pick"
		if c.Want[Prefill] {
			out += " p"
		}
		if c.Want[Decode] {
			out += " d"
		}
		if !c.Want[Prefill] && c.Prefill.ID != 0 {
			out += " for " + nameOf(Prefill, c.Prefill)
		}
		if c.Unlike[Decode].ID != 0 {
			out += " unlike " + nameOf(Decode, c.Unlike[Decode])
		}
		if c.Pays {
			out += " pays"
		}
		return out
	case CmdUndo:
		return "undo"
	case CmdReserve, CmdAsk:
		s.numbers[rank] = c.Number
		return [...]string{CmdReserve: "reserve ", CmdAsk: "ask "}[c.Kind] + rank
	case CmdSend:
		switch {
		case c.Side == Prefill:
			return "prefill " + rank
		case c.IsRemote:
			return fmt.Sprintf("decode %s %s %d", rank, nameOf(Prefill, c.Prefill), c.Params)
		}
		return "local " + rank
	case CmdRelay:
		return "relay"
	case CmdCancel:
		return strings.TrimSpace("cancel " + rank)
	case CmdRelease:
		out := strings.TrimSpace("release "+rank) + " " + c.Cause.String()
		if c.Charge {
			out += " charged"
		}
		if c.HeldUntil != 0 {
			out += " held"
		}
		return out
	case CmdPardon:
		return "pardon " + rank
	case CmdSuspect:
		return "suspect " + rank
	case CmdDiscard:
		return fmt.Sprintf("discard %d", c.Params)
	case CmdAlarm:
		return "alarm " + rank
	case CmdPairFailed:
		return "pair-failed " + nameOf(Prefill, c.Prefill) + " " + nameOf(Decode, c.Rank)
	case CmdAnswer:
		out := "answer " + answerNames[c.Answer]
		if c.Answer == AnswerOwn || c.Answer == AnswerWords {
			out += " " + c.Cause.String()
		}
		return out
	case CmdCount:
		return "count " + wayNames[c.Way] + " " + resultNames[c.Result]
	case CmdNote:
		return "note " + noteNames[c.Note]
	}
	return "?"
}

const (
	reserved = "start; chosen p1 d1; reserved d1; reserved p1;"          // both sides have a ticket
	answered = reserved + "done p1 7;"                                   // the decode leg is started
	sent     = answered + "sent d1;"                                     // it is written
	redone   = sent + "error d1; chosen p2 d1; reserved p2; reserved d1" // the second pair
	locally  = "start; local d1; reserved d1; sent d1;"
)

// TestPlanOfTwoLegs: every row of what may happen to a leg, with what follows from it.
func TestPlanOfTwoLegs(t *testing.T) {
	for _, x := range []struct {
		name   string
		order  Order
		change func(c *Config)
		before string // events whose commands do not matter here
		events string
		want   string
	}{
		{name: "a pair", events: sent + "first d1; done d1", want: "pick p d; reserve d1; reserve p1; " +
			"prefill p1; decode d1 p1 7; relay; discard 7; release p1 ok; release d1 ok; count remote ok"},
		{
			name: "a decode rank alone", events: locally + "first d1; done d1",
			want: "pick p d; reserve d1; " +
				"local d1; relay; release d1 ok; count local ok",
		},
		{
			name: "no prefill rank", events: "start; fallback d1; reserved d1",
			want: "pick p d; reserve d1; " +
				"note fallback; local d1",
		},
		{
			name: "no prefill rank, fallback fail", change: failing, before: "start",
			events: "fallback d1; reserved d1",
			want: "reserve d1; note fallback; cancel d1; answer no-prefill; count fallback failed; " +
				"release unused",
		},
		{
			name: "a short prompt, fallback fail", change: failing, before: "start",
			events: "local d1; reserved d1",
			want:   "reserve d1; local d1",
		},
		{name: "no rank", events: "start; none", want: "pick p d; answer no-rank; count none failed"},

		{
			name: "P 4xx goes to the client", before: reserved, events: "rejected p1",
			want: "release p1 client_error; release d1 unused; answer words client_error; " +
				"count remote rejected",
		},
		{
			name: "P 5xx: another P, the same D", before: reserved, events: "error p1; chosen p2; " +
				"reserved p2",
			want: "note prefill-failed; release p1 engine_error charged; note redo; pick p; reserve p2; " +
				"prefill p2",
		},
		{
			name: "P cut", before: reserved, events: "cut p1",
			want: "note prefill-failed; release p1 reset; note redo; pick p",
		},
		{
			name: "P takes no connection", before: reserved, events: "nodial p1",
			want: "note prefill-failed; release p1 connection_refused; note redo; pick p",
		},
		{
			name: "P is busy: not its fault", before: reserved, events: "busy p1",
			want: "note prefill-failed; release p1 engine_busy; note redo; pick p",
		},
		{
			name: "P does not answer", before: reserved, events: "at 10s",
			want: "note prefill-failed; cancel p1; release p1 first_token_timeout charged; " +
				"note redo; pick p",
		},
		{
			name: "a second P fails: D alone", before: reserved + "error p1; chosen p2; reserved p2",
			events: "error p2", want: "note prefill-failed; release p2 engine_error; note fallback; local d1",
		},
		{
			name:   "a second P fails in the same words: it is about the request",
			before: reserved + "error p1 5; chosen p2; reserved p2", events: "error p2 5",
			want: "release p2 engine_error; release d1 unused; pardon p1; answer words engine_error; " +
				"count remote rejected",
		},
		{
			name: "a second P fails, fallback fail", change: failing,
			before: reserved + "error p1; chosen p2; reserved p2", events: "error p2",
			want: "note prefill-failed; release p2 engine_error; note fallback; release d1 unused; " +
				"answer no-prefill; " +
				"count fallback failed",
		},
		{
			name: "no other P", before: reserved + "error p1", events: "local d1",
			want: "note fallback; local d1",
		},
		{
			name: "two deaths", before: reserved + "cut p1; chosen p2; reserved p2", events: "cut p2",
			want: "note prefill-failed; release p2 reset; release d1 unused; answer two-died; " +
				"count remote failed",
		},
		{
			name: "null parameters: D alone, counted", before: reserved, events: "done p1",
			want: "note null-params; release p1 ok; note fallback; local d1",
		},
		{
			name: "null parameters, fallback fail", change: failing, before: reserved, events: "done p1",
			want: "note null-params; release p1 ok; note fallback; release d1 unused; answer no-prefill; " +
				"count fallback failed",
		},

		{
			name: "P refuses", before: "start; chosen p1 d1; reserved d1", events: "refused p1; chosen p2",
			want: "pick p; reserve p2",
		},
		{
			name: "four P refuse", before: "start; chosen p1 d1; reserved d1; refused p1; chosen p2; " +
				"refused p2; chosen p3; refused p3; chosen p4", events: "refused p4",
			want: "note fallback; local d1",
		},
		{
			name: "D refuses", before: "start; chosen p1 d1; reserved p1", events: "refused d1; chosen p9 d2",
			want: "pick d for p1; reserve d2",
		},
		{
			name: "four D refuse", before: "start; chosen p1 d1; reserved p1; refused d1; chosen p1 d2; " +
				"refused d2; chosen p1 d3; refused d3; chosen p1 d4", events: "refused d4",
			want: "release p1 unused; answer own no_lease; count remote failed",
		},
		{
			name: "both refuse", before: "start; chosen p1 d1; refused p1",
			events: "refused d1; chosen p2 d2",
			want:   "cancel; pick p d; reserve d2; reserve p2",
		},

		{
			name: "D takes no connection: another D gets the parameters", before: answered,
			events: "nodial d1; chosen p1 d2; reserved d2",
			want:   "release d1 connection_refused; pick d for p1; reserve d2; decode d2 p1 7",
		},
		{
			name: "three D take no connection", before: answered + "nodial d1; chosen p1 d2; reserved d2; " +
				"nodial d2; " +
				"chosen p1 d3; reserved d3", events: "nodial d3",
			want: "release d3 connection_refused; discard 7; release p1 ok held; note fallback; " +
				"pick d",
		},
		{
			name: "D 4xx goes to the client, its parameters are over", before: sent, events: "rejected d1",
			want: "release d1 client_error; release p1 ok held; discard 7; " +
				"answer words client_error; count remote rejected",
		},
		{
			name: "D 5xx: once more, nobody is charged", before: sent, events: "error d1; chosen p2 d1",
			want: "note kv-failure; release d1 kv_failure; pair-failed p1 d1; discard 7; " +
				"release p1 ok held; note redo; pick p d unlike d1; reserve d1; reserve p2",
		},
		{
			name: "D 5xx again: D alone", before: redone + "; done p2 8; sent d1",
			events: "error d1; local d1; reserved d1",
			want: "note kv-failure; release d1 kv_failure; pair-failed p2 d1; discard 8; " +
				"release p2 ok held; note fallback; pick d; reserve d1; local d1",
		},
		{name: "and then plainly: D is charged", before: redone + "; done p2 8; sent d1; error d1; " +
			"local d1; " +
			"reserved d1", events: "error d1", want: "release d1 engine_error charged; " +
			"answer words engine_error; " +
			"count fallback failed"},
		{
			name: "D without a first byte", before: sent, events: "done d1",
			want: "note kv-failure; release d1 kv_failure; pair-failed p1 d1; discard 7; " +
				"release p1 ok held; note redo; pick p d unlike d1",
		},
		{
			name: "D is busy", before: sent, events: "busy d1",
			want: "release d1 engine_busy; discard 7; release p1 ok held; note redo; " +
				"pick p d unlike d1",
		},
		{
			name: "D cut: it is charged, P is not", before: sent, events: "cut d1",
			want: "release d1 reset; discard 7; release p1 ok held; note redo; pick p d",
		},
		{
			name: "D is silent", before: sent, events: "at 5s",
			want: "note decode-late; cancel d1; release d1 kv_failure; pair-failed p1 d1; " +
				"discard 7; release p1 ok held; note redo; pick p d unlike d1",
		},
		{
			name: "D cut in its stream", before: sent + "first d1", events: "cut d1",
			want: "release d1 reset; answer lost; count remote lost",
		},
		{
			name: "an error event in its stream", before: sent + "first d1", events: "error d1",
			want: "release d1 engine_error charged; answer lost; count remote lost",
		},
		{name: "a long stream has no limit", before: sent + "first d1", events: "at 300s", want: ""},

		{
			name: "alone: 4xx", before: locally, events: "rejected d1",
			want: "release d1 client_error; answer words client_error; count local rejected",
		},
		{
			name: "alone: 5xx", before: locally, events: "error d1; local d2; reserved d2",
			want: "release d1 engine_error charged; pick d pays; reserve d2; local d2",
		},
		{
			name: "alone: too late", before: locally, events: "at 10s",
			want: "cancel d1; release d1 first_token_timeout charged; pick d pays",
		},
		{name: "alone: three fail", before: locally + "error d1; local d2; reserved d2; nodial d2; " +
			"local d3; " +
			"reserved d3", events: "nodial d3", want: "release d3 connection_refused; " +
			"answer own connection_refused; " +
			"count local failed"},
		{
			name: "alone: two die", before: locally + "cut d1; local d2; reserved d2", events: "cut d2",
			want: "release d2 reset; answer two-died; count local failed",
		},

		{
			name: "the lease is nearly over before D is there", before: "start; chosen p1 d1; reserved d1; " +
				"reserved p1; done p1 7; nodial d1", events: "at 25s",
			want: "note params-late; discard 7; release p1 ok held; note redo; cancel; pick p d",
		},
		{
			name: "a shorter lease: half of it", change: func(c *Config) { c.Lease = 8 * time.Second },
			before: "start; chosen p1 d1; reserved d1; reserved p1; done p1 7; nodial d1", events: "at 4s",
			want: "note params-late; discard 7; release p1 ok held; note redo; cancel; pick p d",
		},
		{
			name: "the process stood still during the prefill", before: reserved + "at 6s frozen",
			events: "done p1 7", want: "note params-late; discard 7; release p1 ok held; note redo; pick p",
		},
		{
			name: "the process stood still for a moment", before: reserved + "at 1s frozen",
			events: "done p1 7", want: "decode d1 p1 7",
		},
		{
			name: "the shell found the parameters too old", before: answered, events: "late d1",
			want: "note params-late; release d1 params_late; discard 7; release p1 ok held; " +
				"note redo; pick p d",
		},
		{
			name: "the connection was being closed: redone for free", events: "not_resent d1", before: sent,
			want: "release d1 not_resent; discard 7; release p1 ok held; note redo; pick p d",
		},
		{
			name: "P's connection was being closed: redone for free", order: Together, before: reserved,
			events: "not_resent p1", want: "note prefill-failed; release p1 not_resent; cancel d1; " +
				"release d1 given_up; note redo; pick p d",
		},
		{
			name: "the process stood still in the write", before: answered + "at 3s frozen",
			events: "sent d1",
			want: "note params-late; cancel d1; alarm d1; release d1 given_up; discard 7; " +
				"release p1 ok held; note redo; pick p d",
		},
		{
			name: "and the first byte comes with the write", before: answered + "at 3s frozen",
			events: "first d1",
			want: "note params-late; cancel d1; alarm d1; release d1 given_up; discard 7; " +
				"release p1 ok held; note redo; pick p d",
		},
		{
			name: "the process stood still before the first byte", before: sent + "at 3s frozen",
			events: "first d1",
			want: "note params-late; cancel d1; alarm d1; release d1 given_up; discard 7; " +
				"release p1 ok held; note redo; pick p d",
		},
		{
			name: "or before an error", before: sent + "at 3s frozen", events: "error d1",
			want: "alarm d1; note kv-failure; release d1 kv_failure; pair-failed p1 d1; " +
				"discard 7; release p1 ok held; note redo; pick p d unlike d1",
		},
		{name: "the first byte is so late that the lease may be over", change: func(c *Config) {
			c.DecodeLimit = time.Minute
		}, before: sent, events: "at 27500ms", want: "note decode-late; cancel d1; alarm d1; " +
			"release d1 kv_failure; " +
			"pair-failed p1 d1; discard 7; release p1 ok held; note redo; pick p d unlike d1"},
		{
			name: "alone: the process stood still before the first byte", before: locally + "at 3s frozen",
			events: "first d1", want: "note stood-still; cancel d1; release d1 stood_still; pick d",
		},
		{
			name: "alone: or in the stream", before: locally + "first d1; at 3s frozen", events: "done d1",
			want: "release d1 ok; count local ok",
		},

		{
			name: "P is fenced in its leg", before: reserved, events: "fenced p1",
			want: "note prefill-failed; cancel p1; release p1 unit_lost; note redo; pick p",
		},
		{
			name: "P is fenced with parameters under way", before: sent, events: "fenced p1",
			want: "note prefill-failed; release p1 ok held; cancel d1; release d1 given_up; " +
				"discard 7; note redo; pick p d",
		},
		{name: "P is fenced after the first byte", before: sent + "first d1", events: "fenced p1", want: ""},
		{name: "another incarnation of P is fenced", before: sent, events: "fenced p2", want: ""},
		{
			name: "P is fenced before it admits", before: "start; chosen p1 d1; reserved d1",
			events: "fenced p1; reserved p1", want: "cancel p1; pick p; release unused",
		},
		{
			name: "D is fenced while P computes: P goes on", before: reserved,
			events: "fenced d1; chosen p1 d2; done p1 7; reserved d2",
			want:   "release d1 unused; pick d for p1; reserve d2; decode d2 p1 7",
		},
		{
			name: "D is fenced with parameters", before: sent, events: "fenced d1",
			want: "cancel d1; release d1 unit_lost; discard 7; release p1 ok held; note redo; " +
				"pick p d",
		},
		{
			name: "D is fenced in its stream", before: sent + "first d1", events: "fenced d1",
			want: "cancel d1; release d1 given_up; answer lost; count remote lost",
		},
		{
			name: "D alone is fenced", before: locally, events: "fenced d1",
			want: "cancel d1; release d1 unit_lost; pick d",
		},

		{
			name: "the client leaves before a choice", before: "start", events: "gone; chosen p1 d1",
			want: "cancel; count none gone; undo",
		},
		{
			name: "the client leaves before the tickets", before: "start; chosen p1 d1",
			events: "gone; reserved p1; refused d1",
			want:   "cancel d1; cancel p1; count remote gone; release unused",
		},
		{
			name: "the client leaves in the prefill", before: reserved, events: "gone; done p1 7",
			want: "release d1 unused; cancel p1; release p1 given_up; count remote gone; " +
				"discard 7",
		},
		{
			name: "the client leaves between the legs", before: answered + "nodial d1", events: "gone",
			want: "cancel; release p1 ok held; discard 7; count remote gone",
		},
		{
			name: "the client leaves before the first byte", before: sent, events: "gone; first d1; done d1",
			want: "cancel d1; release d1 given_up; release p1 ok held; discard 7; " +
				"count remote gone",
		},
		{
			name: "the client leaves in the stream", before: sent + "first d1", events: "gone",
			want: "cancel d1; release d1 given_up; count remote gone",
		},
		{
			name: "the client's time is over", before: sent, events: "deadline",
			want: "cancel d1; release d1 given_up; release p1 ok held; discard 7; " +
				"answer deadline; count remote deadline",
		},

		{
			name: "push", order: DecodeFirst, before: reserved, events: "sent d1; done p1 7; first d1; " +
				"done d1",
			want: "prefill p1; discard 7; relay; release p1 ok; release d1 ok; count remote ok",
		},
		{
			name: "push: D first", order: DecodeFirst, before: "start; chosen p1 d1; reserved p1",
			events: "reserved d1", want: "decode d1 p1 0",
		},
		{
			name: "push: D takes no connection", order: DecodeFirst, before: reserved, events: "nodial d1",
			want: "release d1 connection_refused; pick d for p1",
		},
		{
			name: "push: P fails, D is cancelled", order: DecodeFirst, before: sentPush, events: "error p1",
			want: "note prefill-failed; release p1 engine_error charged; cancel d1; " +
				"release d1 given_up; note redo; pick p d",
		},
		{
			name: "push: D fails, P is cancelled", order: DecodeFirst, before: sentPush, events: "error d1",
			want: "note kv-failure; release d1 kv_failure; pair-failed p1 d1; cancel p1; " +
				"release p1 given_up; note redo; pick p d unlike d1",
		},
		{
			name: "push: D is fenced", order: DecodeFirst, before: sentPush, events: "fenced d1",
			want: "cancel d1; release d1 unit_lost; cancel p1; release p1 given_up; note redo; " +
				"pick p d",
		},
		{
			name: "push: D waits for nothing", order: DecodeFirst, before: sentPush + "done p1 7",
			events: "at 15s",
			want: "note decode-late; cancel d1; release d1 kv_failure; pair-failed p1 d1; " +
				"release p1 ok held; note redo; pick p d unlike d1",
		},
		{
			name: "push: no parameters are no fault", order: DecodeFirst, before: sentPush, events: "done p1",
			want: "",
		},

		{
			name: "both at once", order: Together, before: "start; chosen p1 d1; reserved p1",
			events: "reserved d1", want: "decode d1 p1 0; prefill p1",
		},
		{
			name: "both: D is faster than P's answer", order: Together, before: reserved + "sent d1",
			events: "first d1; done p1; done d1",
			want:   "relay; release p1 ok; release d1 ok; count remote ok",
		},
		{
			name: "both: D has all before P answers", order: Together, before: reserved + "sent d1; first d1",
			events: "done d1",
			want:   "release d1 ok; cancel p1; release p1 given_up; count remote ok",
		},
		{
			name: "both: P fails behind the first byte", order: Together, before: reserved + "sent d1; " +
				"first d1",
			events: "error p1; done d1", want: "release p1 engine_error charged; release d1 ok; " +
				"count remote ok",
		},
		{
			name: "both: P 4xx", order: Together, before: reserved, events: "rejected p1",
			want: "release p1 client_error; cancel d1; release d1 given_up; " +
				"answer words client_error; count remote rejected",
		},
		{
			name: "both: D takes no connection", order: Together, before: reserved,
			events: "nodial d1; at 1s; chosen p2 d2",
			want: "release d1 connection_refused; cancel p1; release p1 given_up; note redo; " +
				"pick p d; reserve d2; reserve p2",
		},
		{
			name: "both: D dies, P says no more: another D alone", order: Together, before: reserved,
			events: "cut d1; at 1s; local d2; reserved d2",
			want: "release d1 reset; cancel p1; release p1 given_up; note fallback; pick d; reserve d2; " +
				"local d2",
		},
		{
			name: "both: D dies, P goes on", order: Together, before: reserved, events: "cut d1; done p1 7",
			want: "release d1 reset; discard 7; release p1 ok held; note fallback; pick d",
		},
		{
			name: "both: D dies, P fails without it", order: Together, before: reserved,
			events: "cut d1; error p1", want: "release d1 reset; release p1 given_up; note fallback; pick d",
		},
		{
			name: "both: D dies, and P", order: Together, before: reserved, events: "cut d1; cut p1",
			want: "release d1 reset; release p1 reset; answer two-died; count remote failed",
		},
		{
			name: "both: D dies, and P is fenced", order: Together, before: reserved,
			events: "engine_dead d1; fenced p1 failed",
			want: "release d1 engine_dead; cancel p1; release p1 unit_lost; answer two-died; " +
				"count remote failed",
		},
		{
			name: "both: P dies, and D takes no connection", order: Together, before: reserved,
			events: "cut p1; nodial d1; local d2; reserved d2; cut d2",
			want: "note prefill-failed; release p1 reset; release d1 given_up; note fallback; pick d; " +
				"reserve d2; local d2; release d2 reset; answer two-died; count fallback failed",
		},
		{
			name: "both: P dies, D has all that it needs", order: Together, before: reserved + "sent d1",
			events: "cut p1; first d1; at 9s; done d1",
			want:   "note prefill-failed; release p1 reset; relay; release d1 ok; count remote ok",
		},
		{
			name: "both: P dies, fallback fail", order: Together, change: failing, before: reserved,
			events: "cut p1; at 1s",
			want: "note prefill-failed; release p1 reset; cancel d1; release d1 given_up; note fallback; " +
				"answer no-prefill; count fallback failed",
		},
		{
			name: "both: D dies, the client leaves", order: Together, before: reserved,
			events: "cut d1; gone; done p1",
			want:   "release d1 reset; cancel p1; release p1 given_up; count remote gone",
		},
		{
			name: "both: D 4xx", order: Together, before: reserved + "sent d1", events: "rejected d1",
			want: "release d1 client_error; cancel p1; release p1 given_up; " +
				"answer words client_error; count remote rejected",
		},
	} {
		t.Run(x.name, func(t *testing.T) {
			cfg := testConfig(x.order)
			if x.change != nil {
				x.change(&cfg)
			}
			s := newScript(t, cfg)
			s.play(x.before)
			s.out = nil
			s.play(x.events)
			assert.Equal(t, x.want, strings.Join(s.out, "; "))
		})
	}
}

const sentPush = reserved + "sent d1;"

func failing(c *Config) { c.FallbackFails = true }

func TestWatch(t *testing.T) {
	var w Watch
	for now := time.Duration(0); now < 10*time.Second; now += WatchPeriod {
		assert.Zero(t, w.At(now).Gap)
	}
	frozen := w.At(30 * time.Second)
	assert.Equal(t, 30*time.Second, frozen.Gap, "whoever asks first after the gap sees it")
	assert.Equal(t, Instant{Now: 30 * time.Second, Gap: 30 * time.Second}, w.At(20*time.Second),
		"a clock that jumps back changes nothing")
	f := Fence{Since: 5 * time.Second, Deadline: 40 * time.Second}
	assert.False(t, f.IsUsable(frozen))
	f.Since = 30 * time.Second
	assert.True(t, f.IsUsable(frozen))
	assert.False(t, f.IsUsable(Instant{Now: 40 * time.Second}))
}

func TestReach(t *testing.T) {
	assert.Equal(t, 25*time.Second, Usable(30*time.Second))
	assert.Equal(t, 115*time.Second, Usable(120*time.Second))
	assert.Equal(t, 10*time.Second, Usable(20*time.Second))
}

// TestPlanDeadline: the shell is told when to come back.
func TestPlanDeadline(t *testing.T) {
	s := newScript(t, testConfig(PrefillFirst))
	expect := func(events string, want time.Duration) {
		t.Helper()
		s.play(events)
		at, ok := s.plan.Deadline()
		assert.Equal(t, want != 0, ok)
		assert.Equal(t, want, at)
	}
	expect("start; chosen p1 d1; reserved d1", 0)
	expect("at 1s; reserved p1", 11*time.Second)
	expect("at 2s; done p1 7", 7*time.Second)
	expect("nodial d1", 27*time.Second)
	expect("chosen p1 d2; reserved d2; sent d2; first d2", 0)
	expect("done d2", 0)
	assert.True(t, s.plan.IsSettled())
}
