package ingress

import (
	lru "container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dpserve/dpserve/actors/msg"
	"github.com/dpserve/dpserve/internal/engine/openai"
	"github.com/dpserve/dpserve/internal/rankleg"
	"github.com/dpserve/dpserve/routing/kvindex"
)

// Bounds of requests to an engine's tokenizer.
const (
	tokenizeTime = 2 * time.Second // limit for an answer
	// pause after a failed call, so that requests do not all wait for a broken tokenizer
	tokenizePause = 2 * time.Second
	maxTokenized  = 64 << 20 // bytes of an answer
)

// Results of tokenizing a prompt, as in dpserve_tokenize_total.
const (
	tokenizeHit      = "hit"
	tokenizeMiss     = "miss"
	tokenizeFallback = "fallback" // the prompt is identified by its text
)

// tokenizer turns the text prompts of an application into blocks of token ids. It asks one of the
// application's engines once per prompt, keeps the answers, and lets equal prompts wait for one answer. Safe
// for concurrent use.
type tokenizer struct {
	router      *appRouter
	pausedUntil atomic.Int64 // clock, in ns

	mu    sync.Mutex
	known chainCache
	calls map[tokenizeKey]*tokenizeCall
}

// tokenizeKey identifies a prompt with everything that decides its blocks.
type tokenizeKey struct{ hi, lo, root uint64 }

// tokenChain is a tokenized prompt: its full blocks and its number of tokens. Immutable.
type tokenChain struct {
	blocks []uint64
	tokens int
}

// tokenizeCall is a request to an engine's tokenizer that is under way.
type tokenizeCall struct {
	done  chan struct{}
	chain *tokenChain // nil: the call failed
}

func newTokenizer(ar *appRouter) *tokenizer {
	return &tokenizer{
		router: ar, known: newChainCache(ar.in.limits.TokenizeBytes),
		calls: map[tokenizeKey]*tokenizeCall{},
	}
}

// identify fills p's blocks from the tokens of a text prompt; false: the prompt is to be identified by its
// text. That includes prompts with images and other media, which have no place in the tokens of a text.
func (t *tokenizer) identify(ctx context.Context, p *prompt, scan *openai.Body, body []byte,
	h http.Header,
) bool {
	hi, lo := scan.TokenizeKey(body, t.router.in.seed)
	if hi == 0 {
		return false
	}
	p.unit, p.size = kvindex.Tokens, t.router.tokensPerBlock()
	key := tokenizeKey{hi, lo, t.router.in.hash().Root(p.rootSalt(t.router))}
	found, how := t.find(key), tokenizeHit
	if found == nil && !scan.Media(body) {
		found, how = t.chainFor(ctx, key, p, scan, body, h), tokenizeMiss
	}
	if found == nil {
		t.router.metrics.Load().Tokenize(tokenizeFallback)
		p.unit = 0
		return false
	}
	t.router.metrics.Load().Tokenize(how)
	p.blocks = append(p.blocks[:0], found.blocks...)
	p.tokens, p.estimated, p.perBlock = found.tokens, false, ratio{int64(p.size), 1}
	return true
}

func (t *tokenizer) find(key tokenizeKey) *tokenChain {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.known.get(key)
}

// chainFor gets a prompt's chain from an engine, or from a call under way for the same prompt; nil if there
// is none.
func (t *tokenizer) chainFor(ctx context.Context, key tokenizeKey, p *prompt, scan *openai.Body, body []byte,
	h http.Header,
) *tokenChain {
	known, f, leads := t.joinCall(key)
	switch {
	case known != nil:
		return known
	case f == nil:
		return nil
	case leads:
		p.tokenizeBody = scan.TokenizeBody(p.tokenizeBody[:0], body)
		t.runCall(ctx, key, f, p, h)
		return f.chain
	}
	select {
	case <-f.done:
		return f.chain
	case <-ctx.Done():
		return nil
	}
}

// joinCall returns a known chain, or a call to wait for, or a new call to lead; nothing while the tokenizer
// is paused.
func (t *tokenizer) joinCall(key tokenizeKey) (known *tokenChain, f *tokenizeCall, leads bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.known.get(key); c != nil {
		return c, nil, false
	}
	if f := t.calls[key]; f != nil {
		return nil, f, false
	}
	if int64(t.router.in.clock()) < t.pausedUntil.Load() {
		return nil, nil, false
	}
	f = &tokenizeCall{done: make(chan struct{})}
	t.calls[key] = f
	return nil, f, true
}

// runCall asks an engine and keeps the answer. The call goes on when its client leaves, because others may
// wait for it; it ends after tokenizeTime, or when the ingress ends.
func (t *tokenizer) runCall(ctx context.Context, key tokenizeKey, f *tokenizeCall, p *prompt,
	h http.Header,
) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), tokenizeTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		if errors.Is(context.Cause(ctx), errDrained) {
			cancel()
		}
	})()
	defer func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.calls, key)
		if f.chain != nil {
			t.known.put(key, f.chain)
		}
		close(f.done)
	}()
	if err := t.tokenize(call, p, h); err != nil {
		if !errors.Is(err, errNotTokenized) {
			t.pausedUntil.Store(int64(t.router.in.clock() + tokenizePause))
		}
		return
	}
	hash := t.router.in.hash()
	f.chain = &tokenChain{
		blocks: hash.Tokens(make([]uint64, 0, len(p.ids)/p.size), key.root, p.ids, p.size, nil),
		tokens: len(p.ids),
	}
}

// errNotTokenized is an engine's refusal of this very prompt.
var errNotTokenized = errors.New("the engine did not tokenize the prompt")

// tokenize asks a ready rank's engine and stores the ids in p.ids.
func (t *tokenizer) tokenize(ctx context.Context, p *prompt, h http.Header) error {
	rk := t.router.anyReadyRank(nil)
	if rk == nil {
		return errNotTokenized
	}
	resp, err := t.ask(ctx, rk, p, t.header(h))
	if err != nil {
		return err
	}
	defer closeBody(resp)
	switch {
	case resp.StatusCode == http.StatusBadRequest:
		return errNotTokenized
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("/tokenize answered %d", resp.StatusCode)
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxTokenized))
	if err != nil {
		return err
	}
	var ok bool
	if p.ids, ok = openai.ParseTokenize(p.ids[:0], answer); !ok {
		return errors.New("/tokenize gave no tokens")
	}
	return nil
}

// ask posts p.tokenizeBody to a rank's engine.
func (t *tokenizer) ask(ctx context.Context, rk *rank, p *prompt, h http.Header) (*http.Response, error) {
	q := &rankleg.Request{
		Rank: rk.Rank, Route: openai.Tokenize, Header: h, Body: p.tokenizeBody, FirstToken: tokenizeTime,
		Model: p.engineName,
	}
	resp, reply, err := rk.asker.Ask(ctx, q)
	if err == nil && reply.Refusal != msg.Granted {
		err = errNotTokenized
	}
	return resp, err
}

// header passes the client's authorization on.
func (t *tokenizer) header(client http.Header) http.Header {
	out := http.Header{"Content-Type": {"application/json"}, "User-Agent": nil, "Via": t.router.in.via}
	if v := client["Authorization"]; len(v) > 0 {
		out["Authorization"] = v
	}
	return out
}

const (
	tokenizedBytes = 256 // bytes of an entry beside its blocks
	tokenizedShare = 8   // an entry larger than 1/8 of all is not kept
)

// chainCache is an LRU cache of tokenized prompts, bounded in bytes. Not safe for concurrent use.
type chainCache struct {
	limit int
	bytes int
	at    map[tokenizeKey]*lru.Element
	order *lru.List // of chainEntry, most recently used first
}

type chainEntry struct {
	key   tokenizeKey
	chain *tokenChain
}

func newChainCache(limit int) chainCache {
	return chainCache{limit: limit, at: map[tokenizeKey]*lru.Element{}, order: lru.New()}
}

func (c *tokenChain) bytes() int { return tokenizedBytes + 8*cap(c.blocks) }

// get returns a chain, or nil.
func (t *chainCache) get(key tokenizeKey) *tokenChain {
	e := t.at[key]
	if e == nil {
		return nil
	}
	t.order.MoveToFront(e)
	return entryOf(e).chain
}

// put keeps a chain, and evicts the least recently used ones.
func (t *chainCache) put(key tokenizeKey, c *tokenChain) {
	if c.bytes() > t.limit/tokenizedShare || t.at[key] != nil {
		return
	}
	t.at[key] = t.order.PushFront(chainEntry{key, c})
	for t.bytes += c.bytes(); t.bytes > t.limit; {
		e := t.order.Back()
		t.order.Remove(e)
		delete(t.at, entryOf(e).key)
		t.bytes -= entryOf(e).chain.bytes()
	}
}

func entryOf(e *lru.Element) chainEntry {
	entry, _ := e.Value.(chainEntry) // put adds nothing else
	return entry
}
