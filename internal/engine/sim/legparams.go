package sim

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

// legParams are the kv_transfer_params of a request, member by member: like the real engines, nothing checks
// them before they are used. The zero value is a request without any.
type legParams struct {
	members map[string]json.RawMessage
}

// has reports whether a member is there, with whatever value.
func (p *legParams) has(name string) bool { _, ok := p.members[name]; return ok }

// isTrue reports whether Python takes the member for true.
func (p *legParams) isTrue(name string) bool {
	switch raw := bytes.TrimSpace(p.members[name]); string(raw) {
	case "", "null", "false", "0", "0.0", `""`, "[]", "{}":
		return false
	default:
		return true
	}
}

// wantsLease is a prefill leg, wantsBlocks a decode leg. Both at once is one and the other.
func (p *legParams) wantsLease() bool { return p.isTrue("do_remote_decode") }

func (p *legParams) wantsBlocks() bool { return p.isTrue("do_remote_prefill") }

// text is a member that is a string.
func (p *legParams) text(name string) string {
	var s string
	_ = json.Unmarshal(p.members[name], &s) // "" is what a wrong type is worth
	return s
}

// number is a member that is a whole number, in any spelling; -1 = it is none.
func (p *legParams) number(name string) int {
	n, err := strconv.Atoi(strings.Trim(string(bytes.TrimSpace(p.members[name])), `"`))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// address is where the prefill engine's side channel is, as the parameters say.
func (p *legParams) address() string {
	return sideAddress(p.text("remote_host"), max(0, p.number("remote_port")))
}

// blocks are the numbers of remote_block_ids; false = they have not the form [[…]] with numbers in it.
func (p *legParams) blocks() ([]int32, bool) {
	var groups [][]int32
	if err := json.Unmarshal(p.members["remote_block_ids"], &groups); err != nil || len(groups) == 0 {
		return nil, false
	}
	return groups[0], true
}

// promptIDs are the prompt's tokens as the prefill engine told them; nil = the text is tokenized.
func (p *legParams) promptIDs(f *fields) []uint32 {
	if !p.wantsBlocks() || !p.isTrue("prompt_token_ids") {
		return nil
	}
	got, ok := f.prompt(p.members["prompt_token_ids"])
	if !ok || !got.fromIDs {
		f.refuse("kv_transfer_params.prompt_token_ids", "want a list of token ids")
		return nil
	}
	return got.ids
}

// What NIXL's scheduler and workers need of a decode leg's parameters.
func pullKeys() []string {
	return []string{"remote_engine_id", "remote_request_id", "remote_host", "remote_port"}
}

func pushKeys() []string { return append(pullKeys(), "tp_size", "pp_size") }

// lacks is the first of names that is not there.
func (p *legParams) lacks(names []string) (string, bool) {
	for _, name := range names {
		if !p.has(name) {
			return name, true
		}
	}
	return "", false
}

// pullAnswer are the parameters that a prefill leg is answered with, in the order of the imitated engine.
type pullAnswer struct {
	RemotePrefill bool      `json:"do_remote_prefill"`
	RemoteDecode  bool      `json:"do_remote_decode"`
	Blocks        [][]int32 `json:"remote_block_ids"`
	Engine        string    `json:"remote_engine_id"`
	Request       string    `json:"remote_request_id"`
	Host          string    `json:"remote_host"`
	Port          int       `json:"remote_port"`
	TP            int       `json:"tp_size"`
	DCP           int       `json:"dcp_size"`
	PP            int       `json:"pp_size"`
	Tokens        int       `json:"remote_num_tokens"`
	Expiry        any       `json:"remote_blocks_expiry_time,omitempty"` // null, and not there for push
	Mode          string    `json:"transfer_mode"`
	Cached        int       `json:"remote_prefill_cached_tokens"`
}
