package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// RouterClient asks the router of one application. Safe for concurrent use.
type RouterClient struct {
	c    *Client
	path string
}

// Override replaces parameters of policy kv for one request; nil fields stay. Other policies refuse it.
type Override struct {
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty"` // what a block to prefill costs against one that is decoded
	RouterTemperature  *float64 `json:"router_temperature,omitempty"`   // 0 = the lowest cost, above it a draw
}

// BestWorkerRequest asks where a prompt should go.
type BestWorkerRequest struct {
	TokenIDs  []uint32  `json:"token_ids"`
	RequestID string    `json:"request_id,omitempty"`             // "" = only a question; else a place is reserved under it
	Model     string    `json:"model,omitempty"`                  // a name that the application serves; "" = its model, no adapter
	Worker    string    `json:"worker,omitempty"`                 // GROUP/RANK: this one or an error; "" = the policy decides
	Override  *Override `json:"router_config_override,omitempty"` // nil = the application's parameters
}

// Worker is where a prompt should go.
type Worker struct {
	Worker        string  `json:"worker"`         // GROUP/RANK
	Group         int     `json:"group"`          //
	DPRank        int     `json:"dp_rank"`        // the rank's number in its group
	OverlapBlocks int     `json:"overlap_blocks"` // of the prompt, cached there
	HitTokens     int     `json:"hit_tokens"`     // the same in tokens
	BlockSize     int     `json:"block_size"`     // tokens per block
	Reason        string  `json:"reason"`         // why this one: lowest_score, highest_score, prefix_match …
	Node          string  `json:"node"`           // that runs it
	URL           string  `json:"url"`            // of its engine, as that node sees it: a started engine listens at its loopback
	Addressing    string  `json:"addressing"`     // how the engine is told the rank: url | header | body
	Selector      int     `json:"selector"`       // what it is told
	RequestID     string  `json:"request_id"`     // reserved under; "" = not reserved
	ExpiresS      float64 `json:"expires_s"`      // seconds until a reservation ends by itself
}

// BestWorker says where a prompt should go. Without RequestID nothing changes. With it the place is taken as by a request, until
// Free or until it expires (300 s); call MarkPrefillComplete at the first token. Error codes: invalid_argument, not_found (the
// application or the worker), conflict (the request id is in use), overloaded (no room), unavailable (no rank is ready).
func (r *RouterClient) BestWorker(ctx context.Context, q BestWorkerRequest) (Worker, error) {
	var w Worker
	err := r.c.call(ctx, http.MethodPost, r.path+"/best_worker", q, &w)
	return w, err
}

// PotentialLoad is what a worker would have in hand with one more request.
type PotentialLoad struct {
	Worker        string `json:"worker"`
	Group         int    `json:"group"`
	DPRank        int    `json:"dp_rank"`
	PrefillTokens int64  `json:"potential_prefill_tokens"` // still to prefill, this prompt's uncached ones included
	DecodeBlocks  int64  `json:"potential_decode_blocks"`  // in use by open requests, this one's new ones included
}

// PotentialLoads says what each worker would have in hand with this prompt; without ids, what it has.
func (r *RouterClient) PotentialLoads(ctx context.Context, ids []uint32) ([]PotentialLoad, error) {
	var out struct {
		Loads []PotentialLoad `json:"loads"`
	}
	err := r.c.call(ctx, http.MethodPost, r.path+"/potential_loads", map[string]any{"token_ids": ids}, &out)
	return out.Loads, err
}

// MarkPrefillComplete says that the first token of a reservation's request has come.
func (r *RouterClient) MarkPrefillComplete(ctx context.Context, requestID string) error {
	return r.reservation(ctx, "/mark_prefill_complete", requestID)
}

// Free ends a reservation. Code not_found: it was freed before, or has expired.
func (r *RouterClient) Free(ctx context.Context, requestID string) error {
	return r.reservation(ctx, "/free", requestID)
}

func (r *RouterClient) reservation(ctx context.Context, path, requestID string) error {
	var out struct{}
	return r.c.call(ctx, http.MethodPost, r.path+path, map[string]string{"request_id": requestID}, &out)
}

// Query asks what the router would decide. Exactly one of Prompt, TokenIDs, Request and Replay is given.
type Query struct {
	Prompt   *string           `json:"prompt,omitempty"`
	TokenIDs []uint32          `json:"token_ids,omitempty"`
	Request  json.RawMessage   `json:"request,omitempty"` // the body of an inference request
	Replay   string            `json:"replay,omitempty"`  // x-request-id of a request of the last minutes
	Model    string            `json:"model,omitempty"`   // of Prompt and TokenIDs: a name that the application serves
	Route    string            `json:"route,omitempty"`   // of Prompt and Request: /v1/chat/completions …
	Headers  map[string]string `json:"headers,omitempty"` // of Prompt and Request
	Worker   string            `json:"worker,omitempty"`  // GROUP/RANK that is taken under every policy
	Override *Override         `json:"router_config_override,omitempty"`
}

// encode is the JSON of q with the bytes of q.Request unchanged. json.Marshal would compact them and escape <, > and &: the
// router hashes the bytes of a prompt, so it would explain another request than the one that clients send.
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

// Explanation is one decision with everything it was made of.
type Explanation struct {
	App       string            `json:"app"`
	Policy    string            `json:"policy"`
	Identity  string            `json:"identity"` // what the prompt's blocks are made of: text | tokens
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

// RankExplanation is one rank's part in a decision.
type RankExplanation struct {
	Worker     string   `json:"worker"`
	Group      int      `json:"group"`
	Rank       int      `json:"rank"`
	Eligible   bool     `json:"eligible"`
	State      string   `json:"state"` // ok | silent | full | busy | draining | not-ready | tried | unknown
	Why        string   `json:"why"`   // why it could not be picked
	InFlight   int      `json:"in_flight"`
	MaxOngoing int      `json:"max_ongoing"`
	KVUsage    *float64 `json:"kv_usage"`
	HitTokens  int      `json:"hit_tokens"`
	HitBlocks  int      `json:"hit_blocks"`
	HostTokens int      `json:"host_tokens"`
	DiskTokens int      `json:"disk_tokens"`
	Terms      []Term   `json:"terms"`
	Score      *float64 `json:"score"` // nil: the policy gave it none
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

// Replay is what a request of the past was decided on.
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

// Explain says what the router would decide, and why; nothing changes.
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

// Reset makes the router forget what it has learned and ask every rank anew; it gives the number of ranks asked. Requests in
// flight are not touched.
func (r *RouterClient) Reset(ctx context.Context) (ranks int, err error) {
	var out struct {
		Ranks int `json:"ranks"`
	}
	err = r.c.call(ctx, http.MethodPost, r.path+"/reset", nil, &out)
	return out.Ranks, err
}

// Info describes a router.
type Info struct {
	App           string         `json:"app"`
	Policy        string         `json:"policy"`
	Preset        string         `json:"preset"`
	Params        map[string]any `json:"params"`
	Identity      string         `json:"identity"`
	Reads         []string       `json:"reads"` // what the policy reads beyond load: hits, blocks, text, session
	BusyThreshold *float64       `json:"busy_threshold"`
	CachingOff    bool           `json:"prefix_caching_off"`
	Ranks         int            `json:"ranks"`
	Ready         int            `json:"ready"`
	Queued        int            `json:"queued"`
	Reservations  int            `json:"reservations"`
	Tripped       int            `json:"tripped"`   // of ranks: their answers failed in a row
	LeftOut       int            `json:"left_out"`  // of Tripped: get nothing until a canary comes back
	Imbalance     float64        `json:"imbalance"` // open requests on the fullest rank over the mean
	Index         *Index         `json:"index"`     // nil: the policy reads no caches
	Law           *Law           `json:"law"`       // nil: the policy predicts no times
}

// Law is how long a router expects its workers' engines to take: the milliseconds of a preset, times what it measured beside them.
type Law struct {
	Preset         string        `json:"preset"`          // dense or moe
	Prefill        float64       `json:"prefill"`         // measured factor on the preset's milliseconds of a prefill; 1 = as the preset says
	Decode         float64       `json:"decode"`          // the same for steps that only decode
	PrefillSamples uint64        `json:"prefill_samples"` // prompts whose first token was timed
	DecodeSamples  uint64        `json:"decode_samples"`  // spans in which a rank did nothing but decode
	AgeS           float64       `json:"age_s"`           // seconds since the last sample; 0 without one
	Error          float64       `json:"error"`           // mean |observed/predicted - 1| of the last first tokens that were timed
	Ranks          []WorkerSpeed `json:"ranks"`           // workers that showed a speed of their own
}

// WorkerSpeed is one worker beside the others.
type WorkerSpeed struct {
	Worker string  `json:"worker"`
	Slow   float64 `json:"slow"`   // how long it takes beside the median of all; 2 = twice as long
	LagMs  float64 `json:"lag_ms"` // how old its records are when they come to the router; 0 = not known
}

// Index is the size of a router's picture of its workers' caches.
type Index struct {
	Blocks  int    `json:"blocks"`
	Bytes   int    `json:"bytes"`
	Cap     int    `json:"cap_bytes"`
	Orphans int    `json:"orphans"`
	Evicted uint64 `json:"evicted"`
	Resyncs uint64 `json:"resyncs"`
}

// Info describes the router.
func (r *RouterClient) Info(ctx context.Context) (Info, error) {
	var out Info
	err := r.c.call(ctx, http.MethodGet, r.path, nil, &out)
	return out, err
}
