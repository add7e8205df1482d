package vllm

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"time"
)

// The load of the routing tests: sessions of some turns that begin with one of a few system prompts, several
// sessions at a time. Half of them are chats, half completions of token ids. Every turn repeats the whole
// conversation.
const (
	sessions      = 36
	turns         = 6
	atOnce        = 6 // sessions
	systemPrompts = 4
	systemWords   = 160 // about as many tokens
	turnWords     = 120
	answerTokens  = 24
	think         = 30 * time.Millisecond
	stagger       = 300 * time.Millisecond
)

// words are single tokens of the tiny model, behind a space.
var words = strings.Fields("the quick brown fox jumps over lazy dog tiny tokenizer message world system " +
	"assistant parallel prefixes requests engines route this")

func someWords(rng *rand.Rand, n int) string {
	out := make([]string, n)
	for i := range out {
		out[i] = words[rng.IntN(len(words))]
	}
	return strings.Join(out, " ")
}

// session is one conversation: ids, or messages.
type session struct {
	rng      *rand.Rand
	ids      []uint32
	messages []message
}

// newSession is the n-th session of a load; the shared system prompts depend on the seed only.
func newSession(seed uint64, n int) *session {
	s := &session{rng: rand.New(rand.NewPCG(seed, uint64(n)+1000))}
	system := rand.New(rand.NewPCG(seed, s.rng.Uint64N(systemPrompts)))
	if n%2 == 0 {
		s.messages = []message{{Role: "system", Content: someWords(system, systemWords)}}
	} else {
		s.ids = randomIDs(system, systemWords)
	}
	return s
}

// turn sends the next turn and takes its answer into the conversation.
func (s *session) turn(ctx context.Context, addr string) (answer, error) {
	if s.messages == nil {
		s.ids = append(s.ids, randomIDs(s.rng, turnWords)...)
		a, err := complete(ctx, addr, s.ids, answerTokens, "")
		s.ids = append(s.ids, a.IDs...)
		return a, err
	}
	s.messages = append(s.messages, message{Role: "user", Content: someWords(s.rng, turnWords)})
	a, err := chat(ctx, addr, s.messages, answerTokens)
	s.messages = append(s.messages, message{Role: "assistant", Content: a.Text})
	return a, err
}

// load is what one run of sessions came to.
type load struct {
	mu    sync.Mutex
	tally tally
	ranks map[string]int // requests
	err   error
}

func (l *load) add(a answer, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.err = err
		return
	}
	l.tally.add(a, a.Predicted)
	l.ranks[a.Rank]++
}

// runSessions runs n sessions through addr, atOnce at a time.
func runSessions(ctx context.Context, addr string, seed uint64, n int) *load {
	l := &load{ranks: map[string]int{}}
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	var all sync.WaitGroup
	for worker := range atOnce {
		all.Go(func() {
			sleep(ctx, time.Duration(worker)*stagger) // who comes first is no accident
			for i := range next {
				s := newSession(seed, i)
				for range turns {
					l.add(s.turn(ctx, addr))
					sleep(ctx, think)
				}
			}
		})
	}
	all.Wait()
	return l
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
