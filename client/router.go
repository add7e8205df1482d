package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// RouterClient sends requests to the router of one application. Safe for concurrent use.
type RouterClient struct {
	c    *Client
	path string
}

// Override replaces parameters of policy kv for one request; nil fields keep the application's values. Other
// policies refuse it.
type Override struct {
	// cost of a block to prefill relative to a block to decode
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty"`
	// 0 picks the lowest cost, above it the pick is random
	RouterTemperature *float64 `json:"router_temperature,omitempty"`
}

// BestWorkerRequest asks for the best worker of a prompt.
type BestWorkerRequest struct {
	TokenIDs []uint32 `json:"token_ids"`
	// a place is reserved under this id; "" = no reservation
	RequestID string `json:"request_id,omitempty"`
	// a name that the application serves; "" = its model, no adapter
	Model string `json:"model,omitempty"`
	// GROUP/RANK: only this worker; "" = the policy decides
	Worker   string    `json:"worker,omitempty"`
	Override *Override `json:"router_config_override,omitempty"` // nil = the application's parameters
}

// Worker is the worker that a router picked for a prompt.
type Worker struct {
	Worker        string `json:"worker"`         // GROUP/RANK
	Group         int    `json:"group"`          //
	DPRank        int    `json:"dp_rank"`        // the rank's number in its group
	OverlapBlocks int    `json:"overlap_blocks"` // of the prompt, cached there
	HitTokens     int    `json:"hit_tokens"`     // the same in tokens
	BlockSize     int    `json:"block_size"`     // tokens per block
	// reason of the pick: lowest_score, highest_score, prefix_match …
	Reason string `json:"reason"`
	Node   string `json:"node"` // node of the worker
	// URL of its engine, as seen by that node: a started engine listens on its node's loopback
	URL        string  `json:"url"`
	Addressing string  `json:"addressing"` // how a request names the rank to the engine: url | header | body
	Selector   int     `json:"selector"`   // value that names the rank to the engine
	RequestID  string  `json:"request_id"` // id of the reservation; "" = not reserved
	ExpiresS   float64 `json:"expires_s"`  // seconds until a reservation ends by itself
}

// BestWorker returns the best worker for a prompt. Without RequestID nothing changes. With it, the request's
// place is reserved until Free or until the reservation expires (300 s); call MarkPrefillComplete at the
// first token. Error codes: invalid_argument, not_found (the application or the worker), conflict (the
// request id is in use), overloaded (no room), unavailable (no rank is ready).
func (r *RouterClient) BestWorker(ctx context.Context, q BestWorkerRequest) (Worker, error) {
	var w Worker
	err := r.c.call(ctx, http.MethodPost, r.path+"/best_worker", q, &w)
	return w, err
}

// PotentialLoad is a worker's load with one more request.
type PotentialLoad struct {
	Worker string `json:"worker"`
	Group  int    `json:"group"`
	DPRank int    `json:"dp_rank"`
	// tokens to prefill, including this prompt's uncached ones
	PrefillTokens int64 `json:"potential_prefill_tokens"`
	// blocks of open requests, including this one's new blocks
	DecodeBlocks int64 `json:"potential_decode_blocks"`
}

// PotentialLoads returns each worker's load with this prompt added; without ids, the present load.
func (r *RouterClient) PotentialLoads(ctx context.Context, ids []uint32) ([]PotentialLoad, error) {
	var out struct {
		Loads []PotentialLoad `json:"loads"`
	}
	err := r.c.call(ctx, http.MethodPost, r.path+"/potential_loads", map[string]any{"token_ids": ids}, &out)
	return out.Loads, err
}

// MarkPrefillComplete reports the first token of a reservation's request.
func (r *RouterClient) MarkPrefillComplete(ctx context.Context, requestID string) error {
	return r.changeReservation(ctx, "/mark_prefill_complete", requestID)
}

// Free ends a reservation. Code not_found means that it was freed before or has expired.
func (r *RouterClient) Free(ctx context.Context, requestID string) error {
	return r.changeReservation(ctx, "/free", requestID)
}

func (r *RouterClient) changeReservation(ctx context.Context, path, requestID string) error {
	var out struct{}
	return r.c.call(ctx, http.MethodPost, r.path+path, map[string]string{"request_id": requestID}, &out)
}

// Query asks for a routing decision. Exactly one of Prompt, TokenIDs, Request and Replay is set.
type Query struct {
	Prompt   *string         `json:"prompt,omitempty"`
	TokenIDs []uint32        `json:"token_ids,omitempty"`
	Request  json.RawMessage `json:"request,omitempty"` // the body of an inference request
	Replay   string          `json:"replay,omitempty"`  // x-request-id of a request of the last minutes
	// for Prompt and TokenIDs: a name that the application serves
	Model    string            `json:"model,omitempty"`
	Route    string            `json:"route,omitempty"`   // for Prompt and Request: /v1/chat/completions …
	Headers  map[string]string `json:"headers,omitempty"` // of Prompt and Request
	Worker   string            `json:"worker,omitempty"`  // GROUP/RANK that is picked under every policy
	Override *Override         `json:"router_config_override,omitempty"`
}

// encode returns the JSON of q with the bytes of q.Request unchanged. json.Marshal would compact them and
// escape <, > and &. The router hashes the bytes of a prompt, so it would explain a different request.
func (q *Query) encode() ([]byte, error) {
	rest := *q
	rest.Request = nil
	out, err := json.Marshal(&rest)
	if err != nil || len(q.Request) == 0 {
		return out, err
	}
	if !json.Valid(q.Request) {
		return nil, errors.New("the request is not JSON")
	}
	out = out[:len(out)-1] // without the closing brace
	if len(out) > 1 {
		out = append(out, ',')
	}
	out = append(out, `"request":`...)
	return append(append(out, q.Request...), '}'), nil
}

// Explanation is one decision with its inputs.
type Explanation struct {
	App       string            `json:"app"`
	Policy    string            `json:"policy"`
	Identity  string            `json:"identity"` // source of the prompt's block hashes: text | tokens
	Tokens    int               `json:"tokens"`
	Estimated bool              `json:"estimated"` // token counts are estimates
	Blocks    int               `json:"blocks"`
	BlockSize int               `json:"block_size"`
	BlockUnit string            `json:"block_unit"` // of BlockSize: tokens | bytes
	Decision  string            `json:"decision"`   // route | queue | reject
	Pick      string            `json:"pick"`
	Reason    string            `json:"reason"`
	Formula   string            `json:"formula"`
	Ranks     []RankExplanation `json:"ranks"`
	Notes     []string          `json:"notes"`
	Replay    *Replay           `json:"replay"`
}

// RankExplanation is one rank in a decision.
type RankExplanation struct {
	Worker     string   `json:"worker"`
	Group      int      `json:"group"`
	Rank       int      `json:"rank"`
	Eligible   bool     `json:"eligible"`
	State      string   `json:"state"` // ok | silent | full | busy | draining | not-ready | tried | unknown
	Why        string   `json:"why"`   // reason why it is not eligible
	InFlight   int      `json:"in_flight"`
	MaxOngoing int      `json:"max_ongoing"`
	KVUsage    *float64 `json:"kv_usage"`
	HitTokens  int      `json:"hit_tokens"`
	HitBlocks  int      `json:"hit_blocks"`
	HostTokens int      `json:"host_tokens"`
	DiskTokens int      `json:"disk_tokens"`
	Terms      []Term   `json:"terms"`
	Score      *float64 `json:"score"` // nil: the policy did not score the rank
	Picked     bool     `json:"picked"`
}

// Term is one summand of a score.
type Term struct {
	Name   string  `json:"name"`
	Unit   string  `json:"unit"`
	Raw    float64 `json:"raw"`
	Weight float64 `json:"weight"`
	Value  float64 `json:"value"`
}

// Replay describes the decision of a past request.
type Replay struct {
	RequestID string         `json:"request_id"`
	At        time.Time      `json:"at"`
	Attempt   int            `json:"attempt"`
	Policy    string         `json:"policy"`
	Pick      string         `json:"pick"`
	Reason    string         `json:"reason"`
	HitTokens int            `json:"hit_tokens"`
	Hits      map[string]int `json:"hits"`
	Tried     []string       `json:"tried"`
}

// Explain returns the router's decision for q and its reasons. It changes nothing.
func (r *RouterClient) Explain(ctx context.Context, q Query) (*Explanation, error) {
	body, err := q.encode()
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	var out Explanation
	if err := r.c.call(ctx, http.MethodPost, r.path+"/explain", encoded(body), &out); err != nil {
		return nil, err
	}
	return &out, nil
}

// Reset drops the router's state and requests a snapshot from every rank; it returns the number of ranks. It
// does not touch requests in flight.
func (r *RouterClient) Reset(ctx context.Context) (ranks int, err error) {
	var out struct {
		Ranks int `json:"ranks"`
	}
	err = r.c.call(ctx, http.MethodPost, r.path+"/reset", nil, &out)
	return out.Ranks, err
}

// Info describes a router.
type Info struct {
	App      string         `json:"app"`
	Policy   string         `json:"policy"`
	Preset   string         `json:"preset"`
	Params   map[string]any `json:"params"`
	Identity string         `json:"identity"`
	// inputs of the policy beyond load: hits, blocks, text, session
	Reads         []string `json:"reads"`
	BusyThreshold *float64 `json:"busy_threshold"`
	CachingOff    bool     `json:"prefix_caching_off"`
	Ranks         int      `json:"ranks"`
	Ready         int      `json:"ready"`
	Queued        int      `json:"queued"`
	Reservations  int      `json:"reservations"`
	Tripped       int      `json:"tripped"` // ranks whose answers failed in a row
	// tripped ranks that get no requests until a canary succeeds
	LeftOut   int     `json:"left_out"`
	Imbalance float64 `json:"imbalance"` // open requests on the fullest rank over the mean
	Index     *Index  `json:"index"`     // nil: the policy reads no caches
	Law       *Law    `json:"law"`       // nil: the policy predicts no times
}

// Law is the router's model of step times: the milliseconds of a preset, multiplied by measured factors.
type Law struct {
	Preset string `json:"preset"` // dense or moe
	// measured factor on the preset's milliseconds of a prefill; 1 = equal to the preset
	Prefill        float64 `json:"prefill"`
	Decode         float64 `json:"decode"`          // the same for steps that only decode
	PrefillSamples uint64  `json:"prefill_samples"` // prompts whose first token was timed
	DecodeSamples  uint64  `json:"decode_samples"`  // time spans in which a rank only decoded
	AgeS           float64 `json:"age_s"`           // seconds since the last sample; 0 without one
	// mean |observed/predicted - 1| of the last timed first tokens
	Error float64       `json:"error"`
	Ranks []WorkerSpeed `json:"ranks"` // workers with a measured speed
}

// WorkerSpeed compares one worker with the others.
type WorkerSpeed struct {
	Worker string  `json:"worker"`
	Slow   float64 `json:"slow"`   // its time over the median of all workers; 2 = twice as slow
	LagMs  float64 `json:"lag_ms"` // age of its records on arrival at the router; 0 = unknown
}

// Index is the size of a router's index of its workers' caches.
type Index struct {
	Blocks  int    `json:"blocks"`
	Bytes   int    `json:"bytes"`
	Cap     int    `json:"cap_bytes"`
	Orphans int    `json:"orphans"`
	Evicted uint64 `json:"evicted"`
	Resyncs uint64 `json:"resyncs"`
}

// Info returns a description of the router.
func (r *RouterClient) Info(ctx context.Context) (Info, error) {
	var out Info
	err := r.c.call(ctx, http.MethodGet, r.path, nil, &out)
	return out, err
}
