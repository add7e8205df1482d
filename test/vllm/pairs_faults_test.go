package vllm

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// testTexts: a text through a pair is that of an unbroken run, and its blocks were moved.
func testTexts(t *testing.T, p *pairs) {
	all := p.questions(pairTexts, 40)
	p.unbroken(p.prefill[0], all)
	const source, moved, computed = "vllm:prompt_tokens_by_source_total", `"external_kv_transfer"`,
		`"local_compute"`
	before, own := metric(t, p.decode, source, moved), metric(t, p.decode, source, computed)
	c := p.askAll(all, pairsAtOnce)
	before, own = metric(t, p.decode, source, moved)-before, metric(t, p.decode, source, computed)-own
	c.served(t, fmt.Sprintf("%d texts:", pairTexts))
	assert.Equal(t, pairTexts, c.whole)
	assert.Equal(t, pairTexts, c.remote, "decide: always")
	t.Logf("prompt tokens of the decode engines: %.0f moved from a prefill engine, %.0f computed", before,
		own)
	assert.Greater(t, before, 4*own, "blocks are moved")
	t.Logf("pairs that answered: %v", c.ranks)
	assert.Len(t, c.ranks, pairSides*pairSides, "every pair is used")
}

// testPrefillKilledBefore: the engine is dead, and dpserve learns of it by a request.
func testPrefillKilledBefore(t *testing.T, p *pairs) {
	all := p.questions(16, 40)
	p.unbroken(p.prefill[1], all)
	p.prefill[0].crash()
	p.askAll(all, pairsAtOnce).served(t, "prefill killed before its leg:")
	p.revive(p.prefill[0])
}

// testPrefillKilledDuring: the engine has the prompts and dies before it answers.
func testPrefillKilledDuring(t *testing.T, p *pairs) {
	all := p.questions(8, 40)
	p.unbroken(p.prefill[1], all)
	p.prefill[0].signalCore(syscall.SIGSTOP)
	done := p.begin(all)
	sleep(t.Context(), time.Second)
	p.prefill[0].crash()
	(<-done).served(t, "prefill killed during its leg:")
	p.revive(p.prefill[0])
}

// testPrefillKilledAfter: the engine has answered and dies before the decode engine has read its blocks.
func testPrefillKilledAfter(t *testing.T, p *pairs) {
	all := p.questions(8, 40)
	p.unbroken(p.prefill[1], all)
	for _, r := range p.decode {
		r.signalCore(syscall.SIGSTOP)
	}
	const finished = "vllm:request_success_total"
	before := metric(t, p.prefill, finished, "")
	done := p.begin(all)
	p.dp.Eventually(func() error {
		if n := metric(t, p.prefill, finished, "") - before; int(n) < len(all) {
			return fmt.Errorf("%v of %d prefill legs have ended", n, len(all))
		}
		return nil
	}, "prefill legs end")
	p.prefill[0].crash()
	for _, r := range p.decode {
		r.signalCore(syscall.SIGCONT)
	}
	(<-done).served(t, "prefill killed after its leg:")
	p.revive(p.prefill[0])
}

// testDecodeKilled: streams of the engine break, everything else goes on.
func testDecodeKilled(t *testing.T, p *pairs) {
	all := p.questions(24, 40)
	p.unbroken(p.prefill[1], all)
	done := p.begin(all)
	sleep(t.Context(), 500*time.Millisecond)
	p.decode[0].crash()
	c := <-done
	c.sound(t, "decode killed:")
	assert.GreaterOrEqual(t, c.whole, len(all)/2, "%v", c.why)
	p.revive(p.decode[0])
}

// testPrefillRestarted: requests come all the time while a prefill engine dies and comes back on its ports.
func testPrefillRestarted(t *testing.T, p *pairs) {
	all := p.known(120)
	stop, done := make(chan struct{}), make(chan *count, 1)
	go func() { done <- p.askUntil(stop, all) }()
	p.prefill[0].crash()
	p.revive(p.prefill[0])
	sleep(t.Context(), 2*time.Second)
	close(stop)
	(<-done).served(t, "prefill restarted under load:")
	c := p.askAll(p.known(16), pairsAtOnce)
	c.served(t, "after it:")
	assert.Equal(t, c.whole, c.remote)
}

// askUntil asks the questions one behind the other, again and again.
func (p *pairs) askUntil(stop <-chan struct{}, all []*question) *count {
	c := &count{ranks: map[string]int{}}
	var work sync.WaitGroup
	for worker := range pairsAtOnce {
		work.Go(func() {
			for i := worker; ; i += pairsAtOnce {
				q := all[i%len(all)]
				c.add(q, q.ask(p.t.Context(), p.dp.HTTP))
				select {
				case <-stop:
					return
				case <-time.After(100 * time.Millisecond):
				}
			}
		})
	}
	work.Wait()
	return c
}

// known are questions with their texts.
func (p *pairs) known(n int) []*question {
	all := p.questions(n, 40)
	p.unbroken(p.prefill[1], all)
	return all
}

// lease is that of the engines, and frozen is longer.
const (
	lease  = 30 * time.Second
	frozen = lease + 6*time.Second
)

// testProxyFrozen: dpserve stands still while the prefill engines answer. When it goes on, their leases are
// over and their memory has other prompts, and what it reads then looks as if it had come just now.
func testProxyFrozen(t *testing.T, p *pairs) {
	const afterExpiry = "vllm:nixl_num_notifications_after_expiry_total"
	all, late := p.known(8), metric(t, p.prefill, afterExpiry, "")
	for _, r := range p.prefill {
		r.signalCore(syscall.SIGSTOP)
	}
	done := p.begin(all)
	sleep(t.Context(), 1500*time.Millisecond) // the prefill legs are at their engines
	p.dp.Signal(syscall.SIGSTOP)
	for _, r := range p.prefill {
		r.signalCore(syscall.SIGCONT)
	}
	sleep(t.Context(), frozen)
	for i, r := range p.prefill { // every block of theirs gets another prompt
		for k := range 2 * prefillBlocks * blockSize / maxContext {
			ids := randomIDs(newFamilies(uint64(1000*i+k)).rng, maxContext/2)
			_, err := complete(t.Context(), r.addr, ids, 1, "")
			require.NoError(t, err)
		}
	}
	p.dp.Signal(syscall.SIGCONT)
	(<-done).sound(t, "proxy frozen past the lease:")
	p.dp.WaitStatus(pairApp, "RUNNING")
	p.met(pairSides * pairSides)
	again := p.askAll(all, pairsAtOnce) // what is cached by now would show here
	again.served(t, "the same prompts again:")
	late = metric(t, p.prefill, afterExpiry, "") - late
	t.Logf("reads after the end of a lease, by the prefill engines: %.0f", late)
	assert.Zero(t, late)
}

// begin sends all questions at once, and says later what they came to.
func (p *pairs) begin(all []*question) <-chan *count {
	done := make(chan *count, 1)
	go func() { done <- p.askAll(all, len(all)) }()
	return done
}

// revive starts an engine again on its ports, and waits until its pairs have met.
func (p *pairs) revive(r *rank) {
	p.t.Helper()
	r.start()
	r.ready()
	p.dp.WaitStatus(pairApp, "RUNNING")
	p.met(pairSides * pairSides)
}
