package routing

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// The transfer of a prompt from a prefill rank to a decode rank, as long as none was timed: Qwen3-32B in bf16
// (64 layers, 8 KV heads of 128) over 25 Gbit/s, the reference model of the cost model on a link that most
// clusters have.
const (
	transferBytes   = 64 * 8 * 128 * 2 * 2 // of KV cache per token
	transferSpeed   = 25e9 / 8             // bytes per second
	transferTokenMS = 1000.0 * transferBytes / transferSpeed
	handOffMS       = 5 // the second leg, the handshake and the first read
)

const (
	// leastMoved is the shortest transfer, in tokens, whose time says something about the link.
	leastMoved = 1024
	// leastTransfers is how many transfers must be timed before a link counts.
	leastTransfers = 5
	// mostOff is by what factor one transfer may differ from those before and count in full.
	mostOff = 4
	// mostLinks bounds the pairs of machines whose transfers are remembered. The one that was used least
	// recently is forgotten.
	mostLinks = 256
	// linkMemory is the time after the last transfer at which half of a link's difference from the others is
	// forgotten: a slow link gets no prompts, so it could never show that it has recovered.
	linkMemory = 5 * time.Minute
)

// machinePair names the machines of a prefill rank and of a decode rank.
type machinePair struct{ prefill, decode string }

// transferLink is what transfers between two machines took, beside the reference.
type transferLink struct {
	speed
	transfers int
}

// transferTimes is how long transfers take: what those of each pair of machines took, and the median of that
// for the pairs that have not shown a time of their own. One slow link does not change the median.
type transferTimes struct {
	links   map[machinePair]*transferLink
	usual   float64 // median factor on the reference; 0 = nothing is measured, 1 is assumed
	scratch []float64
}

// learn takes a transfer of so many tokens that took ms.
func (t *transferTimes) learn(pair machinePair, tokens int, ms float64, now time.Duration) {
	if tokens < leastMoved || ms-ms != 0 {
		return
	}
	l := t.links[pair]
	if l == nil {
		l = t.add(pair)
	}
	reference := transferTokenMS * float64(tokens)
	expected := reference * l.slowness(cmp.Or(t.usual, 1))
	l.transfers++
	l.learn(min(max(ms, expected/mostOff), expected*mostOff), reference, now)
	t.scratch = t.scratch[:0]
	for _, l := range t.links {
		if l.transfers >= leastTransfers {
			t.scratch = append(t.scratch, l.slowness(1))
		}
	}
	if len(t.scratch) > 0 {
		t.usual = median(t.scratch)
	}
}

// add makes room for a pair of machines.
func (t *transferTimes) add(pair machinePair) *transferLink {
	if len(t.links) >= mostLinks {
		var oldest machinePair
		least := time.Duration(-1)
		for p, l := range t.links {
			if least < 0 || l.last < least {
				oldest, least = p, l.last
			}
		}
		delete(t.links, oldest)
	}
	l := &transferLink{}
	if t.links == nil {
		t.links = map[machinePair]*transferLink{}
	}
	t.links[pair] = l
	return l
}

// factor is how long a transfer between two machines takes beside the reference, and by what factor the link
// must differ from the usual one to count as slower or faster.
func (t *transferTimes) factor(pair machinePair, now time.Duration) (factor, spread float64) {
	if t.usual == 0 {
		return 1, 0
	}
	l := t.links[pair]
	if l == nil || l.transfers < leastTransfers {
		return t.usual, 0
	}
	slow, spread := l.beside(t.usual, linkMemory, now)
	return t.usual * slow, spread
}

// usualMS is the time to move the KV blocks of tokens over a link that is like most.
func (t *transferTimes) usualMS(tokens int64) float64 {
	return handOffMS + cmp.Or(t.usual, 1)*transferTokenMS*float64(tokens)
}

// ms is the time to move the KV blocks of tokens from one rank to another.
func (t *transferTimes) ms(p, d *Rank, tokens int64, now time.Duration) float64 {
	if t.usual == 0 { // there is nothing to look up
		return t.usualMS(tokens)
	}
	factor, _ := t.factor(machinePair{p.Machine, d.Machine}, now)
	return handOffMS + factor*transferTokenMS*float64(tokens)
}

// clone is an independent copy.
func (t *transferTimes) clone() transferTimes {
	out := transferTimes{links: maps.Clone(t.links), usual: t.usual}
	for pair, l := range out.links {
		own := *l
		out.links[pair] = &own
	}
	return out
}

// Transferred learns from a prompt that prefill has computed and decode has read: the first token came so
// long after the prompt was computed, and tokens of it had to be moved. A first token that may have waited
// for prompts of the decode rank's own says nothing.
func (r *PairRouter) Transferred(prefill, decode RankRef, tokens int, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prefill.mu.Lock()
	defer r.prefill.mu.Unlock()
	r.decode.mu.Lock()
	defer r.decode.mu.Unlock()
	p, d, v := r.prefill.view.row(prefill), r.decode.view.row(decode), &r.decode.view
	if p == nil || d == nil || d.Load.Q > int64(d.Load.W+d.Load.F) { // a prompt that was moved counts 1
		return
	}
	mex, ok := r.decode.policy.(Mex)
	if !ok {
		mex = defaultPairMex
	}
	model := mex.current(v)
	n, context := d.decodes()
	ms := float64(took)/float64(time.Millisecond) - handOffMS -
		d.slowness()*model.Step(0, n, int(context), 0) // the last one is that of the first token
	r.table.transfers.learn(machinePair{p.Machine, d.Machine}, tokens, ms, v.Now)
}

// TransferTime is what transfers between two machines take.
type TransferTime struct {
	Prefill, Decode string        // machines
	TokenMS         float64       // per token, as decisions count it
	Spread          float64       // by what factor the link must differ from the usual one to count
	Transfers       int           // that were timed
	Age             time.Duration // of the last one
}

// TransferTimes are the usual time per token in ms, and the links that have shown one of their own, by name.
// now is on View.Now's clock.
func (r *PairRouter) TransferTimes(now time.Duration) (usualMS float64, links []TransferTime) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &r.table.transfers
	for pair, l := range t.links {
		if l.transfers < leastTransfers {
			continue
		}
		factor, spread := t.factor(pair, now)
		links = append(links, TransferTime{
			Prefill: pair.prefill, Decode: pair.decode, TokenMS: factor * transferTokenMS, Spread: spread,
			Transfers: l.transfers, Age: max(0, now-l.last),
		})
	}
	slices.SortFunc(links, func(a, b TransferTime) int {
		return cmp.Or(cmp.Compare(a.Prefill, b.Prefill), cmp.Compare(a.Decode, b.Decode))
	})
	return cmp.Or(t.usual, 1) * transferTokenMS, links
}
