package app

import (
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dpserve/dpserve/internal/problem"
)

func edge(t testing.TB, ranks string, more ...string) *Application {
	t.Helper()
	text := "applications:\n  - name: edge\n    model: {id: qwen}\n    engine: {kind: attach, ranks: " +
		"[" + ranks + "]}\n"
	for _, l := range more {
		text += "    " + l + "\n"
	}
	f, _, err := Parse(Default(), "app.yaml", []byte(text))
	require.NoError(t, err)
	return f.Applications[0]
}

func idle(int) bool { return false }

func TestRanksKeepTheirNumbers(t *testing.T) {
	t.Parallel()
	a := edge(t, `{url: "http://a:1"}, {url: "http://b:1"}, {url: "http://c:1"}`)
	b, gone, err := a.WithoutRank(RankRef{URL: "http://b:1/"})
	require.NoError(t, err)
	assert.Equal(t, 1, *gone.Number)
	assert.Equal(t, []int{0, 2}, b.RankNumbers(0))
	assert.Equal(t, 2, b.DataParallel.DPSize)
	assert.Equal(t, 2, b.NumReplicas)
	assert.Equal(t, []string{"edge/0/0", "edge/0/2"}, unitIDs(b))
	assert.Equal(t, "http://c:1", b.Engine.Rank(0, 2).URL)
	assert.Nil(t, b.Engine.Rank(0, 1))
	assert.Contains(t, string((&File{Applications: []*Application{b}}).Print()), "rank: 2")
	assert.Equal(t, []int{0, 1, 2}, a.RankNumbers(0), "the old one is as it was")

	c, n, err := b.WithRank(AttachRank{URL: "http://d:1", Addressing: AddressURL, Role: RoleBoth}, idle)
	require.NoError(t, err)
	assert.Equal(t, 1, n, "the hole is filled")
	for i := range c.Engine.Ranks {
		assert.Nil(t, c.Engine.Ranks[i].Number, "and nothing is written any more")
	}
	d, n, err := b.WithRank(AttachRank{URL: "http://d:1"}, func(r int) bool { return r == 1 })
	require.NoError(t, err)
	assert.Equal(t, 3, n, "the hole is still being drained")
	assert.Equal(t, []int{0, 2, 3}, d.RankNumbers(0))
}

func unitIDs(a *Application) []string {
	var out []string
	for _, u := range a.Units() {
		out = append(out, u.ID)
	}
	return out
}

func TestRefusalsOfRankChanges(t *testing.T) {
	t.Parallel()
	one := edge(t, `{url: "http://a:1"}`)
	two := edge(t,
		`{url: "http://a:1", addressing: header, selector: 0}, `+
			`{url: "http://a:1", addressing: header, selector: 1}`)
	lock := edge(t, `{url: "http://a:1"}, {url: "http://b:1"}`, "data_parallel: {coupling: lockstep}")
	groups := edge(t, `{url: "http://a:1"}, {url: "http://b:1", group: 1}`)
	sim := parsed(t, "applications: [{name: demo, model: {id: demo}, engine: {kind: sim}}]").Applications[0]
	whole, third := AttachRank{URL: "http://a:1", Addressing: AddressURL},
		AttachRank{URL: "http://a:1", Addressing: AddressHeader, Selector: 2}
	seven := 7
	add := func(a *Application, r AttachRank) error { _, _, err := a.WithRank(r, idle); return err }
	remove := func(a *Application, r RankRef) error { _, _, err := a.WithoutRank(r); return err }
	for name, c := range map[string]struct {
		err  error
		code problem.Code
		text string
	}{
		"the same url": {
			add(one, whole), problem.Conflict,
			"add a rank: http://a:1 is attached already, as edge/0/0",
		},
		"the same selector": {
			add(two, AttachRank{URL: "http://a:1", Addressing: AddressBody, Selector: 1}),
			problem.Conflict, "add a rank: http://a:1 selector 1 is attached already, as edge/0/1",
		},
		"whole after a part": {
			add(two, whole), problem.Conflict,
			"edge/0/0 stands for http://a:1 selector 0, so http://a:1 cannot",
		},
		"part of a whole": {
			add(one, third), problem.Conflict,
			"edge/0/0 stands for http://a:1, so http://a:1 selector 2 cannot",
		},
		"lockstep": {
			add(lock, AttachRank{URL: "http://c:1"}), problem.Conflict,
			"add a rank: the ranks of edge are one lockstep group",
		},
		"lockstep, remove": {
			remove(lock, RankRef{URL: "http://a:1"}), problem.Conflict,
			"remove a rank: the ranks of edge are one lockstep group",
		},
		"groups": {
			add(groups, AttachRank{URL: "http://c:1"}), problem.Conflict,
			"edge has 2 groups",
		},
		"sim": {
			add(sim, AttachRank{URL: "http://c:1"}), problem.Conflict,
			"demo is of kind sim: dpserve starts its engines",
		},
		"last": {
			remove(one, RankRef{Rank: 0}), problem.Conflict,
			"http://a:1 is the last one of edge",
		},
		"unknown": {
			remove(one, RankRef{URL: "http://z:1"}), problem.NotFound,
			"there is no rank http://z:1 in edge",
		},
		"unknown number": {remove(two, RankRef{Rank: 7}), problem.NotFound, "there is no rank edge/0/7"},
		"unknown selector": {
			remove(two, RankRef{URL: "http://a:1", Selector: &seven}), problem.NotFound,
			"there is no rank http://a:1 selector 7 in edge",
		},
		"ambiguous": {
			remove(two, RankRef{URL: "http://a:1"}), problem.Conflict,
			"2 ranks of edge are behind http://a:1",
		},
	} {
		var p *problem.Error
		require.ErrorAs(t, c.err, &p, name)
		assert.Equal(t, c.code, p.Code, name)
		assert.Contains(t, p.Message, c.text, name)
		assert.NotEmpty(t, p.Hint, name)
	}
	require.NoError(t, add(two, third))
	_, gone, err := two.WithoutRank(RankRef{URL: "http://a:1", Selector: new(int)})
	require.NoError(t, err)
	assert.Equal(t, 0, gone.Selector)
}

func TestParseRank(t *testing.T) {
	t.Parallel()
	r, err := ParseRank([]byte(`{"url": "http://h:1/", "addressing": "header", "selector": 3, `+
		`"kv_events": {"connect": "tcp://h:2", "replay": "tcp://h:3"}}`), FamilyVLLM, "")
	require.NoError(t, err)
	assert.Equal(t, AttachRank{
		URL: "http://h:1", Addressing: AddressHeader, Selector: 3, Role: RoleBoth,
		KVEvents: &KVSocket{Connect: "tcp://h:2", Replay: "tcp://h:3"},
	}, r)
	for text, want := range map[string]string{
		``:                                     "nothing is given",
		`[]`:                                   "found a list, wanted a map",
		`{}`:                                   "url: the key url is missing or empty",
		`{"url": "h:1"}`:                       `url: found "h:1", wanted http://HOST:PORT`,
		`{"url": "http://h:1/v1"}`:             `url: found "http://h:1/v1", wanted`,
		`{"url": "http://u:p@h:1"}`:            "url: found a URL with credentials",
		`{"url": "http://h:1", "rank": 2}`:     "rank: dpserve gives the number",
		`{"url": "http://h:1", "group": 1}`:    "group: dpserve gives the number",
		`{"url": "http://h:1", "selecter": 1}`: "selecter: unknown key",
		`{"url": "http://h:1", "selector": 1}`: "selector: selector is sent only with addressing",
		`{"url": "http://h:1", "addressing": "body", "selector": 1}`: "addressing: found body, " +
			"wanted header | url",
		`{"url": "http://h:1", "kv_events": {"connect": "tcp://*:1"}}`:       "kv_events.connect: found",
		`{"url": "http://h:1", "kv_events": {"connect": "", "bind": "tcp"}}`: "kv_events",
		`{"url": "http://h:1", "role": "prefill"}`:                           "role: the application has no",
		`{"url": "http://h:1", "pd": {}}`:                                    "pd: pd is for ranks with role",
		`{"url": "http://h:1`:                                                "not YAML",
	} {
		_, err := ParseRank([]byte(text), FamilyVLLM, "")
		var p *problem.Error
		require.ErrorAs(t, err, &p, text)
		assert.Equal(t, problem.InvalidArgument, p.Code)
		assert.Contains(t, p.Message, want, text)
		assert.NotContains(t, p.Message, "u:p")
	}
}

func TestWrittenNumbers(t *testing.T) {
	t.Parallel()
	a := edge(t, `{url: "http://a:1", rank: 0}, {url: "http://b:1", rank: 5}`)
	assert.Nil(t, a.Engine.Ranks[0].Number, "what goes without saying is not kept")
	assert.Equal(t, []int{0, 5}, a.RankNumbers(0))
	for text, want := range map[string]string{
		`{url: "http://a:1", rank: 1}, {url: "http://b:1"}`: "3:92: applications[0].engine.ranks[1].rank: " +
			"rank 1 of the group is taken by applications[0].engine.ranks[0]",
		`{url: "http://a:1", rank: -1}`: "an integer from 0 to 4095",
		`{url: "http://a:1", rank: 3}, ` +
			`{url: "http://b:1", rank: 3}`: "taken by applications[0].engine.ranks[0]",
	} {
		_, _, err := Parse(Default(), "f",
			[]byte("applications:\n\n  - {name: e, model: {id: m}, engine: {kind: attach, ranks: "+
				"["+text+"]}}\n"))
		require.ErrorContains(t, err, want, text)
	}
	lockstep := `applications: [{name: e, model: {id: m}, ` +
		`data_parallel: {coupling: lockstep}, engine: {kind: attach, ranks: [{url: "http://a:1", rank: 0}]}}]`
	_, _, err := Parse(Default(), "f", []byte(lockstep))
	require.ErrorContains(t, err,
		"ranks[0].rank: the ranks of a lockstep group are numbered in the order of the file")
}

func TestCompareNamesRanksByTheirEngine(t *testing.T) {
	t.Parallel()
	a := edge(t, `{url: "http://a:1"}, {url: "http://b:1"}, {url: "http://c:1"}`)
	b, _, err := a.WithoutRank(RankRef{Rank: 0})
	require.NoError(t, err)
	assert.Equal(t, "data_parallel.dp_size, engine.ranks[http://a:1], num_replicas", diffPaths(Compare(b, a)))
	turned := edge(t, `{url: "http://b:1", rank: 1}, {url: "http://a:1", rank: 0}, {url: "http://c:1"}`)
	assert.Equal(t, "engine.ranks", diffPaths(Compare(a, turned)))
}

// TestRankChangesAreWhatAFileCouldSay: after any adds and removes the others have their numbers, the
// application prints to a file that reads the same, and its sizes multiply.
func TestRankChangesAreWhatAFileCouldSay(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := Default()
		a.Name, a.Model, a.NumGroups = "edge", Model{ID: "m", Source: "m"}, 1
		a.DataParallel.Coupling = Independent
		a.Routing.Policy = DefaultPolicy(Independent)
		a.PlacementGroupStrategy = StrategySpread
		a.Engine.Kind = KindAttach
		now := map[string]int{} // address → number
		n := rapid.IntRange(1, 5).Draw(t, "ranks")
		for i := range n {
			r := AttachRank{URL: "http://h:" + strconv.Itoa(i+1), Addressing: AddressURL, Role: RoleBoth}
			a.Engine.Ranks = append(a.Engine.Ranks, r)
			now[r.URL] = i
		}
		a.DataParallel.DPSize, a.NumReplicas = n, n
		app, busy := &a, map[int]bool{}
		for range rapid.IntRange(0, 30).Draw(t, "steps") {
			url := "http://h:" + strconv.Itoa(rapid.IntRange(1, 9).Draw(t, "engine"))
			_, there := now[url]
			var next *Application
			var err error
			if rapid.Bool().Draw(t, "add") {
				var number int
				next, number, err = app.WithRank(AttachRank{URL: url, Addressing: AddressURL, Role: RoleBoth},
					func(r int) bool { return busy[r] })
				require.Equal(t, there, err != nil)
				if err == nil {
					require.False(t, busy[number])
					for have := range now {
						require.NotEqual(t, now[have], number)
					}
					now[url] = number
				}
			} else {
				next, _, err = app.WithoutRank(RankRef{URL: url})
				require.Equal(t, !there || len(now) == 1, err != nil)
				if err == nil {
					busy[now[url]] = rapid.Bool().Draw(t, "drains long")
					delete(now, url)
				}
			}
			if err != nil {
				var p *problem.Error
				require.ErrorAs(t, err, &p)
				continue
			}
			app = next
			checkRanks(t, app, now)
		}
	})
}

func checkRanks(t *rapid.T, a *Application, want map[string]int) {
	var numbers []int
	for url, n := range want {
		require.Equal(t, url, a.Engine.Rank(0, n).URL)
		numbers = append(numbers, n)
	}
	slices.Sort(numbers)
	require.Equal(t, numbers, a.RankNumbers(0))
	require.Equal(t, len(want), a.DataParallel.DPSize)
	require.Equal(t, len(want), a.NumReplicas)
	require.Len(t, a.Units(), len(want))
	text := (&File{Applications: []*Application{a}}).Print()
	again, _, err := Parse(Default(), "print", text)
	require.NoError(t, err, string(text))
	require.Equal(t, a, again.Applications[0], string(text))
}

func FuzzParseRank(f *testing.F) {
	f.Add([]byte(`{"url": "http://h:1", "addressing": "header", "selector": 3}`))
	f.Add([]byte(`{url: "http://h:1", kv_events: {bind: "tcp://*:1"}, rank: 1}`))
	f.Add([]byte("&a [*a]"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := ParseRank(text, FamilySGLang, TransferSGLang)
		if err != nil {
			require.Equal(t, problem.InvalidArgument, problem.CodeOf(err))
			return
		}
		require.NotEmpty(t, r.URL)
		require.Nil(t, r.Number)
	})
}
