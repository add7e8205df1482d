package dispatch

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
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

func newScript(t *testing.T) *script { return &script{t: t, numbers: map[string]uint32{}} }

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
		switch {
		case err == nil:
			ev.Params, ev.Text = n, n
		case isRank(w) && w[0] == 'p':
			ev.Prefill, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Prefill
		case isRank(w):
			ev.Decode, ev.Rank, ev.Side = rankOf(s.t, w), rankOf(s.t, w), Decode
		case w == "failed":
			ev.EngineFailed = true
		case w == "spent":
			ev.IsSpent = true
		case w == "lost":
			ev.IsLost = true
		case w == "continuable":
			ev.CanContinue = true
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

// isRank reports whether a word names a rank.
var isRank = regexp.MustCompile(`^[pd]\d$`).MatchString

func (s *script) step(ev Event, after time.Duration) {
	s.now += after
	for _, cmd := range s.plan.Step(s.watch.At(s.now), &ev) {
		s.out = append(s.out, s.words(&cmd))
	}
}

var (
	answerNames = [...]string{
		"none", "words", "own", "no-rank", "no-prefill", "two-died", "deadline", "lost", "tickets",
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
		for side, name := range [...]string{" p", " d"} {
			if c.Want[side] {
				out += name
			}
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

// begins are beginnings of requests.
var begins = map[string]string{
	"started":  "start; local d1;",
	"pair":     "start; chosen p1 d1;",
	"reserved": "$pair reserved d1; reserved p1;", // both sides have a ticket
	"answered": "$reserved done p1 7;",            // the decode leg is started
	"sent":     "$answered sent d1;",              // it is written
	"redone":   "$sent error d1; chosen p2 d1; reserved p2; reserved d1;",
	"locally":  "$started reserved d1; sent d1;",
}

func expand(events string) string {
	return os.Expand(events, func(name string) string { return expand(begins[name]) })
}

// options of a row.
var options = map[string]func(s *script, c *Config){
	"push":           func(_ *script, c *Config) { c.Order = DecodeFirst },
	"together":       func(_ *script, c *Config) { c.Order = Together },
	"fallback fails": func(_ *script, c *Config) { c.FallbackFails = true },
	"short lease":    func(_ *script, c *Config) { c.Lease = 8 * time.Second },
	"long decode":    func(_ *script, c *Config) { c.DecodeLimit = time.Minute },
	"twice a rank":   func(_ *script, c *Config) { c.PerRank = 2 },
	"reservation":    func(_ *script, c *Config) { c.IsHeld = true },
	"one attempt":    func(_ *script, c *Config) { c.Attempts = 1 },
	"lockstep":       func(s *script, _ *Config) { s.isLockstep = true },
}

var rowOf = regexp.MustCompile(`(?m)^(\S.*)((?:\n\t.*)+)`)

// RP23, RP24, RP29, RP41, RP44, RP47, RP53: every row of what may happen to a leg, with what follows from it.
func TestPlans(t *testing.T) {
	file, err := os.ReadFile("testdata/plans.txt")
	require.NoError(t, err)
	joined := strings.ReplaceAll(string(file), "\n\t\t", " ")
	for _, section := range strings.Split(joined, "\n## ")[1:] {
		legs, rows, _ := strings.Cut(section, "\n")
		for _, row := range rowOf.FindAllStringSubmatch(rows, -1) {
			head := strings.Split(row[1], "|")
			want := strings.ReplaceAll(strings.TrimSpace(row[2]), "\n\t", " ")
			require.Len(t, head, 3, row[1])
			name, opts, _ := strings.Cut(strings.Trim(head[0], " ]"), " [")
			t.Run(legs+": "+name, func(t *testing.T) {
				cfg, s := testConfig(PrefillFirst), newScript(t)
				if legs == "one leg" {
					cfg = Config{IsAlone: true, Attempts: 3, PerRank: 1, Refusals: 4}
				}
				for _, o := range strings.Split(opts, ", ") {
					if opts != "" {
						require.Contains(t, options, o)
						options[o](s, &cfg)
					}
				}
				s.plan.Begin(&cfg, false)
				s.play(expand(head[1]))
				s.out = nil
				s.play(expand(head[2]))
				assert.Equal(t, want, cmp.Or(strings.Join(s.out, "; "), "-"))
			})
		}
	}
}

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
	s, cfg := newScript(t), testConfig(PrefillFirst)
	s.plan.Begin(&cfg, false)
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
