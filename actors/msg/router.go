package msg

import (
	"encoding/json"
	"time"
)

// RouteQuery asks what an application's Router would decide for a request. Exactly one of Prompt, TokenIDs,
// Request and Replay is given.
type RouteQuery struct {
	// text: the prompt of a completion, or with Route of a chat its one message
	Prompt   *string         `json:"prompt,omitempty"`
	TokenIDs []uint32        `json:"token_ids,omitempty"` // the prompt as ids
	Request  json.RawMessage `json:"request,omitempty"`   // body of an inference request
	Replay   string          `json:"replay,omitempty"`    // x-request-id of a request of the last minutes
	// of Prompt and TokenIDs: a name that the application serves; "" = its model, no adapter
	Model string `json:"model,omitempty"`
	// path of Prompt and Request; "" = /v1/completions, or chat if Request has messages
	Route string `json:"route,omitempty"`
	// of Prompt and Request, as a client would send them
	Headers map[string]string `json:"headers,omitempty"`
	// GROUP/RANK that is taken under every policy; "" = the policy decides
	Worker   string          `json:"worker,omitempty"`
	Override *RouterOverride `json:"router_config_override,omitempty"`
}

// RouterOverride replaces parameters of policy kv for one request.
type RouterOverride struct {
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty"`
	RouterTemperature  *float64 `json:"router_temperature,omitempty"`
}

// Explanation is one decision with all its inputs. The numbers are those of the decision itself, bit for bit.
type Explanation struct {
	App    string `json:"app"`
	Policy string `json:"policy"`
	// what the prompt's blocks were made of: text | tokens; "" = the policy reads no blocks
	Identity string `json:"identity,omitempty"`
	Tokens   int    `json:"tokens"` // of the prompt
	// Tokens, and all token counts below, are bytes / k
	Estimated bool   `json:"estimated"`
	Blocks    int    `json:"blocks"` // full blocks of the prompt that were looked up
	BlockSize int    `json:"block_size,omitempty"`
	BlockUnit string `json:"block_unit,omitempty"` // of BlockSize: tokens | bytes
	Decision  string `json:"decision"`             // route | queue | reject
	Pick      string `json:"pick,omitempty"`
	Reason    string `json:"reason"`
	// how the terms add up, and which score wins; "" = no rank was scored
	Formula string            `json:"formula,omitempty"`
	Ranks   []RankExplanation `json:"ranks"`           // all that the Router knows, by group and rank
	Notes   []string          `json:"notes,omitempty"` // for people
	Replay  *Replay           `json:"replay,omitempty"`
}

// RankExplanation is one rank's part in a decision.
type RankExplanation struct {
	Worker   string `json:"worker"` // GROUP/RANK
	Group    int    `json:"group"`
	Rank     int    `json:"rank"`
	Eligible bool   `json:"eligible"` // it could be picked
	// ok | silent | full | busy | draining | not-ready | tried | unknown
	State string `json:"state"`
	// the reason why it could not be picked, or only if no other rank was left
	Why        string   `json:"why,omitempty"`
	InFlight   int      `json:"in_flight"`
	MaxOngoing int      `json:"max_ongoing"`
	KVUsage    *float64 `json:"kv_usage,omitempty"` // share of its KV cache in use; nil = not known
	HitTokens  int      `json:"hit_tokens"`         // of the prompt, on the device
	HitBlocks  int      `json:"hit_blocks"`         // the same in entries of Blocks, rounded up
	HostTokens int      `json:"host_tokens,omitempty"`
	DiskTokens int      `json:"disk_tokens,omitempty"`
	Terms      []Term   `json:"terms,omitempty"` // nil: the policy gave it no score
	Score      *float64 `json:"score,omitempty"` // sum of the terms' values, in their order
	Picked     bool     `json:"picked,omitempty"`
}

// Term is one summand of a score: Value = Raw × Weight unless the policy says otherwise.
type Term struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Raw    float64 `json:"raw"`
	Weight float64 `json:"weight"`
	Value  float64 `json:"value"`
}

// Replay is what a past request was decided on. The ranks' load of that moment is not kept: the explanation
// around it is what the same request would get now.
type Replay struct {
	RequestID string         `json:"request_id"`
	At        time.Time      `json:"at"`
	Attempt   int            `json:"attempt"` // from 1: dispatches before it failed
	Policy    string         `json:"policy"`
	Pick      string         `json:"pick"`
	Reason    string         `json:"reason"`
	HitTokens int            `json:"hit_tokens"`     // on the picked rank
	Hits      map[string]int `json:"hits,omitempty"` // tokens per rank that held something
	Tried     []string       `json:"tried,omitempty"`
}

// RouterInfo describes an application's Router on this node.
type RouterInfo struct {
	App      string         `json:"app"`
	Policy   string         `json:"policy"`
	Preset   string         `json:"preset"`
	Params   map[string]any `json:"params,omitempty"` // as written in the file
	Identity string         `json:"identity"`
	// what the policy reads beyond load and prompt length: hits, blocks, text, session
	Reads         []string `json:"reads"`
	BusyThreshold *float64 `json:"busy_threshold,omitempty"`
	CachingOff    bool     `json:"prefix_caching_off,omitempty"`
	Ranks         int      `json:"ranks"`
	Ready         int      `json:"ready"`             // get requests
	Tripped       int      `json:"tripped,omitempty"` // their answers failed in a row
	// of Tripped: get nothing until a canary comes back
	LeftOut      int `json:"left_out,omitempty"`
	Queued       int `json:"queued"`
	Reservations int `json:"reservations"`
	// open requests on the fullest ready rank over the mean; 1 = even
	Imbalance float64      `json:"imbalance"`
	Index     *IndexStatus `json:"index,omitempty"` // nil: the policy reads none
	Law       *Law         `json:"law,omitempty"`   // nil: the policy predicts no times
}

// Law is how long a Router expects its engines to take: the milliseconds of a preset, times what it measured
// beside them.
type Law struct {
	Preset string `json:"preset"` // dense | moe
	// measured factor on the preset's milliseconds of a prefill; 1 = as the preset says
	Prefill        float64 `json:"prefill"`
	Decode         float64 `json:"decode"`          // the same for steps that only decode
	PrefillSamples uint64  `json:"prefill_samples"` // prompts whose first token was timed
	DecodeSamples  uint64  `json:"decode_samples"`  // spans in which a rank did nothing but decode
	AgeS           float64 `json:"age_s,omitempty"` // seconds since the last sample, if there is one
	// mean |observed/predicted - 1| of the last first tokens that were timed
	Error float64 `json:"error,omitempty"`
	// those that showed a speed of their own, by group and rank
	Ranks []RankSpeed `json:"ranks,omitempty"`
}

// RankSpeed is one rank beside the others of its application.
type RankSpeed struct {
	Worker string  `json:"worker"` // GROUP/RANK
	Slow   float64 `json:"slow"`   // how long it takes beside the median of all; 2 = twice as long
	// how old its records are when they come to this node; 0 = not known
	LagMs float64 `json:"lag_ms,omitempty"`
}

// ResetResult says what a router reset did.
type ResetResult struct {
	App   string `json:"app"`
	Ranks int    `json:"ranks"` // asked for a snapshot
}

// BestWorker asks for the rank that a prompt should go to. With RequestID it is reserved there until Free.
type BestWorker struct {
	TokenIDs  []uint32 `json:"token_ids"`
	RequestID string   `json:"request_id,omitempty"`
	// a name that the application serves; "" = its model, no adapter
	Model    string          `json:"model,omitempty"`
	Worker   string          `json:"worker,omitempty"` // GROUP/RANK: this one or an error
	Override *RouterOverride `json:"router_config_override,omitempty"`
}

// Worker is the answer: where to send the prompt, and what is cached there.
type Worker struct {
	Worker        string  `json:"worker"` // GROUP/RANK
	Group         int     `json:"group"`
	DPRank        int     `json:"dp_rank"` // the rank's number in its group
	OverlapBlocks int     `json:"overlap_blocks"`
	HitTokens     int     `json:"hit_tokens"`
	BlockSize     int     `json:"block_size"`
	Reason        string  `json:"reason"`
	Node          string  `json:"node"`       // that runs it
	URL           string  `json:"url"`        // of its engine, as that node sees it
	Addressing    string  `json:"addressing"` // how the rank is named there: url | header | body
	Selector      int     `json:"selector,omitempty"`
	RequestID     string  `json:"request_id,omitempty"` // reserved under
	ExpiresS      float64 `json:"expires_s,omitempty"`  // a reservation's time to Free, in seconds
}

// PotentialLoad is what a rank would have in hand with one more request.
type PotentialLoad struct {
	Worker        string `json:"worker"`
	Group         int    `json:"group"`
	DPRank        int    `json:"dp_rank"`
	PrefillTokens int64  `json:"potential_prefill_tokens"`
	DecodeBlocks  int64  `json:"potential_decode_blocks"`
}

// KVRun is one chain of blocks in the index: the first block follows Parent, each other block the one before.
type KVRun struct {
	Worker string   `json:"worker"`
	Tier   string   `json:"tier"`             // gpu | cpu | disk | sent
	Parent string   `json:"parent,omitempty"` // 16 hex digits; "" = the run begins a prompt
	Blocks []string `json:"blocks"`           // 16 hex digits each
}

// Generate asks for tokens: pick, send and account in one call.
type Generate struct {
	TokenIDs []uint32 `json:"token_ids"`
	// members of a /v1/completions body: max_tokens, temperature, stop …
	Sampling  map[string]json.RawMessage `json:"sampling,omitempty"`
	RequestID string                     `json:"request_id,omitempty"`
	// a name that the application serves; "" = its model, no adapter
	Model    string          `json:"model,omitempty"`
	Worker   string          `json:"worker,omitempty"`
	Override *RouterOverride `json:"router_config_override,omitempty"`
}

// Generated is a part of the answer. TokenIDs come as the engine sends them; the last part has a
// FinishReason, and Usage if the engine reported it.
type Generated struct {
	TokenIDs     []uint32    `json:"token_ids"`
	Text         string      `json:"text,omitempty"`
	FinishReason string      `json:"finish_reason,omitempty"`
	Worker       string      `json:"worker,omitempty"`     // with the first part
	RequestID    string      `json:"request_id,omitempty"` // with the first part
	Usage        *TokenUsage `json:"usage,omitempty"`
}

// TokenUsage is an engine's count of a request's tokens.
type TokenUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Cached     int `json:"cached_tokens"`
	Completion int `json:"completion_tokens"`
}
