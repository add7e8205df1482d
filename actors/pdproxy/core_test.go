package pdproxy

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/engine/transfer"
	"github.com/dpserve/dpserve/routing"
)

// script plays events, written as words, against a Core and keeps the commands as words. Ranks are p1, p2, …
// and d1, d2, …; an event of a leg or a reservation names its rank.
type script struct {
	t       *testing.T
	core    *Core
	watch   Watch
	now     time.Duration
	numbers map[string]uint32 // by rank: the number that it was reserved or started with last
	choice  uint32
	out     []string
}

const prefillFirst, decodeFirst, together = transfer.PrefillFirst, transfer.DecodeFirst, transfer.Together

func testConfig(o transfer.Order) Config {
	return Config{
		Order: o, Lease: 30 * time.Second, PrefillLimit: 10 * time.Second, DecodeLimit: 5 * time.Second,
		LocalLimit: 10 * time.Second, MaxDecodes: 3,
	}
}

func newScript(t *testing.T, cfg Config) *script {
	return &script{t: t, core: &Core{cfg: cfg}, numbers: map[string]uint32{}}
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

var kindOf = map[string]EventKind{
	"tick": EvTick, "start": EvStart, "chosen": EvChosen, "local": EvChosen, "fallback": EvChosen,
	"none": EvNoRank, "reserved": EvReserved, "refused": EvRefused, "sent": EvSent, "late": EvTooLate,
	"first": EvFirstByte, "done": EvDone, "nodial": EvDialFailed, "rejected": EvRejected, "busy": EvBusy,
	"error": EvError, "cut": EvCut, "fenced": EvFenced, "gone": EvClientGone, "deadline": EvDeadline,
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
		kind, ok := kindOf[words[0]]
		require.True(s.t, ok, words[0])
		ev := Event{
			Kind: kind, Number: s.choice, Remote: words[0] == "chosen",
			Fallback: words[0] == "fallback",
		}
		for _, w := range words[1:] {
			switch w[0] {
			case 'p':
				ev.Prefill, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Prefill
			case 'd':
				ev.Decode, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Decode
			default:
				n, err := strconv.ParseUint(w, 10, 64)
				require.NoError(s.t, err)
				ev.Params = n
			}
			if kind != EvChosen {
				if n, ok := s.numbers[w]; ok {
					ev.Number = n
				}
			}
		}
		s.step(ev, 0)
	}
}

func (s *script) step(ev Event, after time.Duration) {
	s.now += after
	for _, cmd := range s.core.Step(s.watch.At(s.now), ev) {
		s.out = append(s.out, s.words(&cmd))
	}
}

var (
	endingNames = [...]string{"unused", "ok", "cancelled", "busy", "dial", "cut", "error", "late"}
	answerNames = [...]string{
		"none", "pass", "no-rank", "no-prefill", "failed", "two-died", "deadline",
		"lost",
	}
	wayNames  = [...]string{"none", "remote", "local", "fallback"}
	outNames  = [...]string{"ok", "rejected", "failed", "lost", "deadline", "gone"}
	noteNames = [...]string{
		"redo", "prefill-failed", "null-params", "params-late", "kv-failure", "decode-late", "fallback",
		"stood-still",
	}
)

func (s *script) words(c *Command) string {
	rank := nameOf(c.Side, c.Rank)
	switch c.Kind {
	case CmdChoose:
		s.choice = c.Number
		out := "choose"
		if c.WantPrefill {
			out += " p"
		}
		if c.WantDecode {
			out += " d"
		}
		if !c.WantPrefill && c.Prefill.ID != 0 {
			out += " for " + nameOf(Prefill, c.Prefill)
		}
		if c.Unlike[Decode].ID != 0 {
			out += " unlike " + nameOf(Decode, c.Unlike[Decode])
		}
		return out
	case CmdUndoChoice:
		return "undo"
	case CmdReserve:
		s.numbers[rank] = c.Number
		return "reserve " + rank
	case CmdStartPrefill:
		return "prefill " + rank
	case CmdStartLocal:
		return "local " + rank
	case CmdStartDecode:
		return fmt.Sprintf("decode %s %s %d", rank, nameOf(Prefill, c.Prefill), c.Params)
	case CmdPassOn:
		return "pass-on"
	case CmdCancel:
		return strings.TrimSpace("cancel " + rank)
	case CmdRelease:
		out := strings.TrimSpace("release "+rank) + " " + endingNames[c.Ending]
		if c.HeldUntil != 0 {
			out += " held"
		}
		return out
	case CmdDiscard:
		return fmt.Sprintf("discard %d", c.Params)
	case CmdAlarm:
		return "alarm " + rank
	case CmdAnswer:
		return "answer " + answerNames[c.Answer]
	case CmdCount:
		return "count " + wayNames[c.Way] + " " + outNames[c.Outcome]
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

// TestCoreTables: every row of what may happen to a leg, with what follows from it.
func TestCoreTables(t *testing.T) {
	for _, x := range []struct {
		name   string
		order  transfer.Order
		change func(c *Config)
		before string // events whose commands do not matter here
		events string
		want   string
	}{
		{name: "a pair", events: sent + "first d1; done d1", want: "choose p d; reserve d1; reserve p1; " +
			"prefill p1; decode d1 p1 7; pass-on; discard 7; release p1 ok; release d1 ok; count remote ok"},
		{
			name: "a decode rank alone", events: locally + "first d1; done d1",
			want: "choose p d; reserve d1; " +
				"local d1; pass-on; release d1 ok; count local ok",
		},
		{
			name: "no prefill rank", events: "start; fallback d1; reserved d1",
			want: "choose p d; reserve d1; " +
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
		{name: "no rank", events: "start; none", want: "choose p d; answer no-rank; count none failed"},

		{
			name: "P 4xx goes to the client", before: reserved, events: "rejected p1",
			want: "release p1 ok; release d1 unused; answer pass; count remote rejected",
		},
		{
			name: "P 5xx: another P, the same D", before: reserved, events: "error p1; chosen p2; " +
				"reserved p2",
			want: "note prefill-failed; release p1 error; note redo; choose p; reserve p2; prefill p2",
		},
		{
			name: "P cut", before: reserved, events: "cut p1",
			want: "note prefill-failed; release p1 cut; note redo; choose p",
		},
		{
			name: "P takes no connection", before: reserved, events: "nodial p1",
			want: "note prefill-failed; release p1 dial; note redo; choose p",
		},
		{
			name: "P is busy: not its fault", before: reserved, events: "busy p1",
			want: "note prefill-failed; release p1 busy; note redo; choose p",
		},
		{
			name: "P does not answer", before: reserved, events: "at 10s",
			want: "note prefill-failed; cancel p1; release p1 late; note redo; choose p",
		},
		{
			name: "a second P fails: D alone", before: reserved + "error p1; chosen p2; reserved p2",
			events: "error p2", want: "note prefill-failed; release p2 error; note fallback; local d1",
		},
		{
			name: "a second P fails, fallback fail", change: failing,
			before: reserved + "error p1; chosen p2; reserved p2", events: "error p2",
			want: "note prefill-failed; release p2 error; note fallback; release d1 unused; " +
				"answer no-prefill; " +
				"count fallback failed",
		},
		{
			name: "no other P", before: reserved + "error p1", events: "local d1",
			want: "note fallback; local d1",
		},
		{
			name: "two deaths", before: reserved + "cut p1; chosen p2; reserved p2", events: "cut p2",
			want: "note prefill-failed; release p2 cut; release d1 unused; answer two-died; " +
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
			want: "choose p; reserve p2",
		},
		{name: "three P refuse", before: "start; chosen p1 d1; reserved d1; refused p1; chosen p2; " +
			"refused p2; " +
			"chosen p3", events: "refused p3", want: "note fallback; local d1"},
		{
			name: "D refuses", before: "start; chosen p1 d1; reserved p1", events: "refused d1; chosen p9 d2",
			want: "choose d for p1; reserve d2",
		},
		{
			name: "three D refuse", before: "start; chosen p1 d1; reserved p1; refused d1; chosen p1 d2; " +
				"refused d2; chosen p1 d3", events: "refused d3",
			want: "release p1 unused; answer no-rank; count remote failed",
		},
		{
			name: "both refuse", before: "start; chosen p1 d1; refused p1",
			events: "refused d1; chosen p2 d2",
			want:   "cancel; choose p d; reserve d2; reserve p2",
		},

		{
			name: "D takes no connection: another D gets the parameters", before: answered,
			events: "nodial d1; chosen p1 d2; reserved d2",
			want:   "release d1 dial; choose d for p1; reserve d2; decode d2 p1 7",
		},
		{
			name: "three D take no connection", before: answered + "nodial d1; chosen p1 d2; reserved d2; " +
				"nodial d2; " +
				"chosen p1 d3; reserved d3", events: "nodial d3",
			want: "release d3 dial; release p1 ok held; discard 7; answer failed; count remote failed",
		},
		{
			name: "D 4xx goes to the client, its parameters are over", before: sent, events: "rejected d1",
			want: "release d1 ok; release p1 ok held; discard 7; answer pass; count remote rejected",
		},
		{
			name: "D 5xx: once more, nobody is charged", before: sent, events: "error d1; chosen p2 d1",
			want: "note kv-failure; release d1 cancelled; discard 7; release p1 ok held; note redo; " +
				"choose p d unlike d1; " +
				"reserve d1; reserve p2",
		},
		{
			name: "D 5xx again: D alone", before: redone + "; done p2 8; sent d1",
			events: "error d1; local d1; reserved d1",
			want: "note kv-failure; release d1 cancelled; discard 8; release p2 ok held; note fallback; " +
				"choose d; " +
				"reserve d1; local d1",
		},
		{name: "and then plainly: D is charged", before: redone + "; done p2 8; sent d1; error d1; " +
			"local d1; " +
			"reserved d1", events: "error d1", want: "release d1 error; choose d"},
		{
			name: "D without a first byte", before: sent, events: "done d1",
			want: "note kv-failure; release d1 cancelled; discard 7; release p1 ok held; note redo; " +
				"choose p d unlike d1",
		},
		{
			name: "D is busy", before: sent, events: "busy d1",
			want: "release d1 busy; discard 7; release p1 ok held; note redo; choose p d",
		},
		{
			name: "D cut: it is charged, P is not", before: sent, events: "cut d1",
			want: "release d1 cut; discard 7; release p1 ok held; note redo; choose p d",
		},
		{
			name: "D is silent", before: sent, events: "at 5s",
			want: "note decode-late; cancel d1; release d1 cancelled; discard 7; release p1 ok held; " +
				"note redo; " +
				"choose p d",
		},
		{
			name: "D cut in its stream", before: sent + "first d1", events: "cut d1",
			want: "release d1 cut; answer lost; count remote lost",
		},
		{
			name: "an error event in its stream", before: sent + "first d1", events: "error d1",
			want: "release d1 error; answer lost; count remote lost",
		},
		{name: "a long stream has no limit", before: sent + "first d1", events: "at 300s", want: ""},

		{
			name: "alone: 4xx", before: locally, events: "rejected d1",
			want: "release d1 ok; answer pass; count local rejected",
		},
		{
			name: "alone: 5xx", before: locally, events: "error d1; local d2; reserved d2",
			want: "release d1 error; choose d; reserve d2; local d2",
		},
		{name: "alone: too late", before: locally, events: "at 10s", want: "cancel d1; release d1 late; " +
			"choose d"},
		{name: "alone: three fail", before: locally + "error d1; local d2; reserved d2; busy d2; local d3; " +
			"reserved d3", events: "nodial d3", want: "release d3 dial; answer failed; count local failed"},
		{
			name: "alone: two die", before: locally + "cut d1; local d2; reserved d2", events: "cut d2",
			want: "release d2 cut; answer two-died; count local failed",
		},

		{
			name: "the lease is nearly over before D is there", before: "start; chosen p1 d1; reserved d1; " +
				"reserved p1; done p1 7; nodial d1", events: "at 25s",
			want: "note params-late; discard 7; release p1 ok held; note redo; cancel; choose p d",
		},
		{
			name: "a shorter lease: half of it", change: func(c *Config) { c.Lease = 8 * time.Second },
			before: "start; chosen p1 d1; reserved d1; reserved p1; done p1 7; nodial d1", events: "at 4s",
			want: "note params-late; discard 7; release p1 ok held; note redo; cancel; choose p d",
		},
		{
			name: "the process stood still during the prefill", before: reserved + "at 6s frozen",
			events: "done p1 7", want: "note params-late; discard 7; release p1 ok held; note redo; choose p",
		},
		{
			name: "the process stood still for a moment", before: reserved + "at 1s frozen",
			events: "done p1 7", want: "decode d1 p1 7",
		},
		{
			name: "the shell found the parameters too old", before: answered, events: "late d1",
			want: "note params-late; release d1 cancelled; discard 7; release p1 ok held; note redo; " +
				"choose p d",
		},
		{
			name: "the process stood still in the write", before: answered + "at 3s frozen",
			events: "sent d1",
			want: "note params-late; cancel d1; alarm d1; release d1 cancelled; discard 7; " +
				"release p1 ok held; " +
				"note redo; choose p d",
		},
		{
			name: "and the first byte comes with the write", before: answered + "at 3s frozen",
			events: "first d1",
			want: "note params-late; cancel d1; alarm d1; release d1 cancelled; discard 7; " +
				"release p1 ok held; " +
				"note redo; choose p d",
		},
		{
			name: "the process stood still before the first byte", before: sent + "at 3s frozen",
			events: "first d1",
			want: "note params-late; cancel d1; alarm d1; release d1 cancelled; discard 7; " +
				"release p1 ok held; " +
				"note redo; choose p d",
		},
		{
			name: "or before an error", before: sent + "at 3s frozen", events: "error d1",
			want: "alarm d1; note kv-failure; release d1 cancelled; discard 7; release p1 ok held; " +
				"note redo; " +
				"choose p d unlike d1",
		},
		{name: "the first byte is so late that the lease may be over", change: func(c *Config) {
			c.DecodeLimit = time.Minute
		}, before: sent, events: "at 27500ms", want: "note decode-late; cancel d1; alarm d1; " +
			"release d1 cancelled; " +
			"discard 7; release p1 ok held; note redo; choose p d"},
		{
			name: "alone: the process stood still before the first byte", before: locally + "at 3s frozen",
			events: "first d1", want: "note stood-still; cancel d1; release d1 cancelled; choose d",
		},
		{
			name: "alone: or in the stream", before: locally + "first d1; at 3s frozen", events: "done d1",
			want: "release d1 ok; count local ok",
		},

		{
			name: "P is fenced in its leg", before: reserved, events: "fenced p1",
			want: "note prefill-failed; cancel p1; release p1 cancelled; note redo; choose p",
		},
		{
			name: "P is fenced with parameters under way", before: sent, events: "fenced p1",
			want: "note prefill-failed; release p1 ok held; cancel d1; release d1 cancelled; discard 7; " +
				"note redo; " +
				"choose p d",
		},
		{name: "P is fenced after the first byte", before: sent + "first d1", events: "fenced p1", want: ""},
		{name: "another incarnation of P is fenced", before: sent, events: "fenced p2", want: ""},
		{
			name: "P is fenced before it admits", before: "start; chosen p1 d1; reserved d1",
			events: "fenced p1; reserved p1", want: "cancel p1; choose p; release unused",
		},
		{
			name: "D is fenced while P computes: P goes on", before: reserved,
			events: "fenced d1; chosen p1 d2; done p1 7; reserved d2",
			want:   "release d1 unused; choose d for p1; reserve d2; decode d2 p1 7",
		},
		{
			name: "D is fenced with parameters", before: sent, events: "fenced d1",
			want: "cancel d1; release d1 cancelled; discard 7; release p1 ok held; note redo; choose p d",
		},
		{
			name: "D is fenced in its stream", before: sent + "first d1", events: "fenced d1",
			want: "cancel d1; release d1 cancelled; answer lost; count remote lost",
		},
		{
			name: "D alone is fenced", before: locally, events: "fenced d1",
			want: "cancel d1; release d1 cancelled; choose d",
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
			want: "release d1 unused; cancel p1; release p1 cancelled; count remote gone; discard 7",
		},
		{
			name: "the client leaves between the legs", before: answered + "nodial d1", events: "gone",
			want: "cancel; release p1 ok held; discard 7; count remote gone",
		},
		{
			name: "the client leaves before the first byte", before: sent, events: "gone; first d1; done d1",
			want: "cancel d1; release d1 cancelled; release p1 ok held; discard 7; count remote gone",
		},
		{
			name: "the client leaves in the stream", before: sent + "first d1", events: "gone",
			want: "cancel d1; release d1 cancelled; count remote gone",
		},
		{
			name: "the client's time is over", before: sent, events: "deadline",
			want: "cancel d1; release d1 cancelled; release p1 ok held; discard 7; answer deadline; " +
				"count remote deadline",
		},

		{
			name: "push", order: decodeFirst, before: reserved, events: "sent d1; done p1 7; first d1; " +
				"done d1",
			want: "prefill p1; discard 7; pass-on; release p1 ok; release d1 ok; count remote ok",
		},
		{
			name: "push: D first", order: decodeFirst, before: "start; chosen p1 d1; reserved p1",
			events: "reserved d1", want: "decode d1 p1 0",
		},
		{
			name: "push: D takes no connection", order: decodeFirst, before: reserved, events: "nodial d1",
			want: "release d1 dial; choose d for p1",
		},
		{
			name: "push: P fails, D is cancelled", order: decodeFirst, before: sentPush, events: "error p1",
			want: "note prefill-failed; release p1 error; cancel d1; release d1 cancelled; note redo; " +
				"choose p d",
		},
		{
			name: "push: D fails, P is cancelled", order: decodeFirst, before: sentPush, events: "error d1",
			want: "note kv-failure; release d1 cancelled; cancel p1; release p1 cancelled; note redo; " +
				"choose p d unlike d1",
		},
		{
			name: "push: D is fenced", order: decodeFirst, before: sentPush, events: "fenced d1",
			want: "cancel d1; release d1 cancelled; cancel p1; release p1 cancelled; note redo; choose p d",
		},
		{
			name: "push: D waits for nothing", order: decodeFirst, before: sentPush + "done p1 7",
			events: "at 15s",
			want: "note decode-late; cancel d1; release d1 cancelled; release p1 ok held; note redo; " +
				"choose p d",
		},
		{
			name: "push: no parameters are no fault", order: decodeFirst, before: sentPush, events: "done p1",
			want: "",
		},

		{
			name: "both at once", order: together, before: "start; chosen p1 d1; reserved p1",
			events: "reserved d1", want: "decode d1 p1 0; prefill p1",
		},
		{
			name: "both: D is faster than P's answer", order: together, before: reserved + "sent d1",
			events: "first d1; done p1; done d1",
			want:   "pass-on; release p1 ok; release d1 ok; count remote ok",
		},
		{
			name: "both: D has all before P answers", order: together, before: reserved + "sent d1; first d1",
			events: "done d1",
			want:   "release d1 ok; cancel p1; release p1 cancelled; count remote ok",
		},
		{
			name: "both: P fails behind the first byte", order: together, before: reserved + "sent d1; " +
				"first d1",
			events: "error p1; done d1", want: "release p1 error; release d1 ok; count remote ok",
		},
		{
			name: "both: P 4xx", order: together, before: reserved, events: "rejected p1",
			want: "release p1 ok; cancel d1; release d1 cancelled; answer pass; count remote rejected",
		},
		{
			name: "both: D takes no connection", order: together, before: reserved, events: "nodial d1",
			want: "release d1 dial; cancel p1; release p1 cancelled; note redo; choose p d",
		},
		{
			name: "both: D 4xx", order: together, before: reserved + "sent d1", events: "rejected d1",
			want: "release d1 ok; cancel p1; release p1 cancelled; answer pass; count remote rejected",
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
	assert.Equal(t, 25*time.Second, transfer.Usable(30*time.Second))
	assert.Equal(t, 115*time.Second, transfer.Usable(120*time.Second))
	assert.Equal(t, 10*time.Second, transfer.Usable(20*time.Second))
}

// TestCoreDeadline: the shell is told when to come back.
func TestCoreDeadline(t *testing.T) {
	s := newScript(t, testConfig(prefillFirst))
	expect := func(events string, want time.Duration) {
		t.Helper()
		s.play(events)
		at, ok := s.core.Deadline()
		assert.Equal(t, want != 0, ok)
		assert.Equal(t, want, at)
	}
	expect("start; chosen p1 d1; reserved d1", 0)
	expect("at 1s; reserved p1", 11*time.Second)
	expect("at 2s; done p1 7", 7*time.Second)
	expect("nodial d1", 27*time.Second)
	expect("chosen p1 d2; reserved d2; sent d2; first d2", 0)
	expect("done d2", 0)
	assert.True(t, s.core.IsSettled())
}
