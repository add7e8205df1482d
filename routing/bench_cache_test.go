package routing

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	benchPrompt = 2048
	benchBlocks = benchPrompt / DefaultBlockSize
)

// cacheCycle is a router in the middle of its day under shared prompts: every rank holds the first half of
// the prompt and every second one more, four requests are open on each.
type cacheCycle struct {
	r    *Router
	q    Request
	d    Decision
	e    Event
	live []Event
	next int
}

func newCacheCycle(p Policy, ranks int) *cacheCycle {
	c := &cacheCycle{r: NewRouter(p, 7)}
	for i := range ranks {
		e := up(ID(i/64, i%64), 256)
		e.Capacity, e.BlockSize = 700_000, DefaultBlockSize
		c.r.Observe(e)
		c.q.Hits = append(c.q.Hits, Hit{Rank: e.Rank, Tokens: int32(benchPrompt/2 + i%2*256)})
	}
	c.q.Tokens, c.q.BlockSize = benchPrompt, DefaultBlockSize
	text := make([]byte, 4*benchPrompt)
	for i := range text {
		text[i] = byte('a' + i%26)
	}
	c.q.Text, c.q.Blocks = text, chain(text[:benchBlocks])
	c.live = make([]Event, 4*ranks)
	for range 3 * len(c.live) {
		c.step()
	}
	return c
}

// vary changes the second half of the prompt, as another question behind the same system prompt does.
func (c *cacheCycle) vary() {
	c.q.ID++
	for i := benchBlocks / 2; i < benchBlocks; i++ {
		c.q.Blocks[i] = spread(c.q.ID%64<<32 | uint64(i))
	}
	for i := len(c.q.Text) / 2; i < len(c.q.Text)/2+8; i++ {
		c.q.Text[i] = byte(c.q.ID >> (i % 8) & 63)
	}
	c.q.Session = benchSessions[c.q.ID%uint64(len(benchSessions))]
}

var benchSessions = func() (s [256]string) {
	for i := range s {
		s[i] = fmt.Sprintf("session-%d", i)
	}
	return s
}()

// step ends the oldest request and begins another.
func (c *cacheCycle) step() {
	c.vary()
	if e := &c.live[c.next]; e.Kind == EvUndo {
		c.r.Observe(e)
	}
	c.r.Pick(&c.q, &c.d)
	c.live[c.next] = Event{Kind: EvUndo, Rank: c.d.Ranked[0], ReqID: c.q.ID}
	c.next = (c.next + 1) % len(c.live)
}

// Prompts that change all the time, trees and tables that turn over: still nothing is allocated.
func TestPicksWithPromptsDoNotAllocate(t *testing.T) {
	for _, p := range allPolicies(t) {
		t.Run(fmt.Sprintf("%+v", p), func(t *testing.T) {
			if _, ok := p.(Direct); ok {
				t.Skip("direct needs a name")
			}
			c := newCacheCycle(p, 8)
			if st, ok := c.r.state.(*textState); ok {
				st.tree.limit = 100_000
			}
			steps := 3000
			if testing.Short() {
				steps = 1000
			}
			for range steps {
				c.step()
			}
			assert.InDelta(t, 0, testing.AllocsPerRun(steps/10, c.step), 0)
		})
	}
}

// benchmarkDecide times the decision, and beside it the whole life of a request in the Router (Pick and
// Undo).
func benchmarkDecide(b *testing.B, p Policy) {
	for _, ranks := range []int{8, 64, 1024} {
		c := newCacheCycle(p, ranks)
		c.vary()
		b.Run(fmt.Sprintf("decide/ranks=%d", ranks), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Decide(&c.q, &c.r.view, c.r.state, c.r.rand, &c.d)
			}
		})
		b.Run(fmt.Sprintf("pick+undo/ranks=%d", ranks), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.r.Pick(&c.q, &c.d)
				c.e = Event{Kind: EvUndo, Rank: c.d.Ranked[0], ReqID: c.q.ID}
				c.r.Observe(&c.e)
			}
		})
	}
}

// BenchmarkTextTree is one match and one insertion of a 250 KB prompt whose last kilobyte is new.
func BenchmarkTextTree(b *testing.B) {
	tree := newTextTree(&View{Ranks: []Rank{{ID: ID(0, 0)}}}, maxTreeChars)
	text := make([]byte, 250<<10)
	for i := uint64(0); b.Loop(); i++ {
		text[len(text)-1024] = byte(i)
		text[len(text)-1023] = byte(i >> 8)
		tree.match(text)
		tree.insert(text, ID(0, 0))
	}
}

func BenchmarkPolicy(b *testing.B) {
	for _, name := range []string{
		"round-robin", "random", "power-of-two", "least-loaded", "kv", "scoring", "lmetric-1",
		"lpwl", "least-kv", "cache-aware", "prefix-aware", "session-affinity", "mex",
	} {
		p, err := New(name, PresetTuned, nil)
		require.NoError(b, err)
		b.Run(name, func(b *testing.B) { benchmarkDecide(b, p) })
	}
}
