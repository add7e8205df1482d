package loadgen

import "sync"

// oracleBlock is the number of tokens of a block of the perfect cache: vLLM's and dpserve's default. Engines reuse whole
// blocks only, so a bound that counts single tokens would be out of reach.
const oracleBlock = 16

// oracle tells what one cache without limit, behind a router that always finds it, would have reused of each prompt: the
// longest prefix that was sent before, in whole blocks, at most all but one token. A later turn finds the prompt of the
// turn before it and the answer but for its last token, which no engine computes; a first turn finds its system prompt if
// any session has sent that before. It counts in the tokens that the engine reports; the share of a system prompt in its
// first prompt is taken by bytes. What earlier runs left in the engines it does not know.
type oracle struct {
	mu   sync.Mutex
	sent []bool // per system prompt
}

func newOracle(systemPrompts int) *oracle { return &oracle{sent: make([]bool, systemPrompts)} }

// knew is called as a first turn is sent: whether its system prompt was sent before. -1 is none.
func (o *oracle) knew(system int) bool {
	if system < 0 {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.sent[system]
	o.sent[system] = true
	return before
}

// reusable is what the perfect cache reuses of a prompt, both in tokens.
func reusable(prefix, prompt int) int {
	return max(0, min(prefix, prompt-1)) / oracleBlock * oracleBlock
}
