package client

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"
)

// RouterClient sends requests to the router of one application. Safe for concurrent use.
type RouterClient struct {
	c    *Client
	path string
}

// post sends in as JSON and returns the answer.
func post[T any](ctx context.Context, r *RouterClient, path string, in any) (reply T, err error) {
	body, err := json.Marshal(in)
	if err != nil {
		return reply, newError(CodeInvalidArgument, "", "encode the request: %w", err)
	}
	return ask[T](ctx, r.c, request{method: http.MethodPost, path: r.path + path, body: body, json: true})
}

// Override replaces parameters of policy kv for one request; nil fields keep the application's values. Other
// policies refuse it.
type Override struct {
	// cost of a block to prefill relative to a block to decode
	OverlapScoreWeight *float64 `json:"overlap_score_weight,omitempty"`
	// 0 picks the lowest cost, above it the pick is random
	RouterTemperature *float64 `json:"router_temperature,omitempty"`
}

// BestWorkerRequest asks for the best worker of a prompt. With RequestID a place is reserved there until
// Free.
type BestWorkerRequest struct {
	TokenIDs  []uint32 `json:"token_ids"`
	RequestID string   `json:"request_id,omitempty"` // "" = no reservation
	// a name that the application serves; "" = its model, no adapter
	Model    string    `json:"model,omitempty"`
	Worker   string    `json:"worker,omitempty"`                 // GROUP/RANK; "" = the policy decides
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
	Addressing string  `json:"addressing"`           // how the rank is named there: url | header | body
	Selector   int     `json:"selector,omitempty"`   // value that names the rank to the engine
	RequestID  string  `json:"request_id,omitempty"` // id of the reservation; "" = not reserved
	ExpiresS   float64 `json:"expires_s,omitempty"`  // seconds until a reservation ends by itself
	// of an application with a prefill and a decode pool: the rank that is to compute the prompt before the
	// worker continues it; nil: the worker computes it. A reservation holds a place on both
	PrefillWorker *Worker `json:"prefill_worker,omitempty"`
}

// BestWorker returns the best worker for a prompt. Without RequestID nothing changes. With it, the request's
// place is reserved until Free or until the reservation expires (300 s); call MarkPrefillComplete at the
// first token. Error codes: invalid_argument, not_found (the application or the worker), conflict (the
// request id is in use), overloaded (no room), unavailable (no rank is ready).
func (r *RouterClient) BestWorker(ctx context.Context, q BestWorkerRequest) (Worker, error) {
	return post[Worker](ctx, r, "/best_worker", q)
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
	type answer struct{ Loads []PotentialLoad }
	out, err := post[answer](ctx, r, "/potential_loads", map[string]any{"token_ids": ids})
	return out.Loads, err
}

// MarkPrefillComplete reports the first token of a reservation's request. It ends the place on a prefill
// worker.
func (r *RouterClient) MarkPrefillComplete(ctx context.Context, requestID string) error {
	return r.tell(ctx, "/mark_prefill_complete", requestID)
}

// Free ends a reservation. Code not_found means that it was freed before or has expired.
func (r *RouterClient) Free(ctx context.Context, requestID string) error {
	return r.tell(ctx, "/free", requestID)
}

// tell sends what happened to a reservation.
func (r *RouterClient) tell(ctx context.Context, path, requestID string) error {
	_, err := post[struct{}](ctx, r, path, map[string]string{"request_id": requestID})
	return err
}

// Query asks what an application's Router would decide for a request. Exactly one of Prompt, TokenIDs,
// Request and Replay is given.
type Query struct {
	// text: the prompt of a completion, or with Route what that route has for a prompt, of a chat its message
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
	Worker   string    `json:"worker,omitempty"`
	Override *Override `json:"router_config_override,omitempty"`
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
		return nil, errors.New("it is cut or malformed")
	}
	out = out[:len(out)-1] // without the closing brace
	if len(out) > 1 {
		out = append(out, ',')
	}
	out = append(out, `"request":`...)
	return append(append(out, q.Request...), '}'), nil
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
	// nil: the application has one pool. Else Pick is the decode rank, and the rest is of the decode pool
	Pair *PairExplanation `json:"pair,omitempty"`
}

// RankExplanation is one rank's part in a decision.
type RankExplanation struct {
	Worker   string `json:"worker"` // GROUP/RANK
	Group    int    `json:"group"`
	Rank     int    `json:"rank"`
	Eligible bool   `json:"eligible"` // it could be picked
	// ok | silent | full | busy | draining | not-ready | lacking | tried | unknown
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
	Policy    string         `json:"policy"`  // of an application with two pools: its decider
	Pick      string         `json:"pick"`
	Reason    string         `json:"reason"`
	Tokens    int            `json:"tokens"`         // of the prompt
	HitTokens int            `json:"hit_tokens"`     // on the picked rank
	Hits      map[string]int `json:"hits,omitempty"` // tokens per rank that held something
	Tried     []string       `json:"tried,omitempty"`
	Pair      *PairReplay    `json:"pair,omitempty"` // nil: the application has one pool
}

// PairExplanation is the decision of an application with a prefill and a decode pool. The Explanation that
// holds it describes the decode pool.
type PairExplanation struct {
	Decide string `json:"decide"` // isl | prefill-load | uncached>=N | always | mex
	// remote: a prefill rank computes the prompt; local: the decode rank does; fallback: the decode rank does
	// because no prefill rank can; none: no rank is taken
	Way     string `json:"way"`
	Prefill string `json:"prefill,omitempty"` // GROUP/RANK in the prefill pool, if Way is remote
	Reason  string `json:"reason"`            // long_prefill, decode_holds …
	Why     string `json:"why"`               // Reason in words, for people
	// tokens of the prompt that the decode rank does not hold
	UncachedTokens int `json:"uncached_tokens"`
	// the pairs that were compared, then the decode rank alone
	Candidates []PairCandidate `json:"candidates"`
	// the prefill pool: its Pick is Prefill, its Reason that of its own policy
	PrefillPool *Explanation `json:"prefill_pool"`
}

// PairCandidate is a pair, or a decode rank alone, with every term of its cost.
type PairCandidate struct {
	Prefill string  `json:"prefill,omitempty"` // GROUP/RANK; "": the decode rank alone
	Decode  string  `json:"decode"`            // GROUP/RANK
	Skip    string  `json:"skip,omitempty"`    // why the pair could not be taken: leases_full, not_prewarmed
	Terms   []Term  `json:"terms"`
	CostMs  float64 `json:"cost_ms"` // sum of the terms' values, in their order
	Picked  bool    `json:"picked,omitempty"`
}

// PairInfo is how the Router of an application decides between its prefill and its decode pool. The Info that
// holds it describes the decode pool.
type PairInfo struct {
	Decide   string `json:"decide"`
	Transfer string `json:"transfer"`
	Fallback string `json:"fallback"`  // local | fail
	Pairs    string `json:"pairs"`     // PairsOn, or "off: " and why
	Met      int    `json:"connected"` // of All
	All      int    `json:"all"`       // pairs of ready ranks
	// decisions so far by reason
	Decisions map[string]uint64 `json:"decisions"`
	// the time of a transfer as decisions count it, in ms per token: the median of Links, without any an
	// assumption
	TransferMs float64        `json:"transfer_token_ms"`
	Links      []TransferLink `json:"links,omitempty"` // by the names of their machines
	Prefill    *Info          `json:"prefill"`         // of the prefill pool
}

// TransferLink is what transfers from one machine to another take, where some were timed.
type TransferLink struct {
	Prefill string  `json:"prefill"` // the machine of the prefill rank
	Decode  string  `json:"decode"`  // the machine of the decode rank
	TokenMs float64 `json:"token_ms"`
	// by what factor the link must differ from the median to count as slower or faster: its time is as
	// uncertain
	Spread    float64 `json:"spread"`
	Transfers int     `json:"transfers"` // that were timed
	AgeS      float64 `json:"age_s"`     // seconds since the last one
}

// PairReplay is the pair decision of a past request.
type PairReplay struct {
	Way     string `json:"way"`               // remote | local | fallback
	Prefill string `json:"prefill,omitempty"` // GROUP/RANK, if Way is remote
}

// Explain returns the router's decision for q and its reasons. It changes nothing.
func (r *RouterClient) Explain(ctx context.Context, q Query) (*Explanation, error) {
	body, err := q.encode()
	if err != nil {
		return nil, newError(CodeInvalidArgument, "it must be the body of an inference request",
			"the request is not JSON: %w", err)
	}
	return ask[*Explanation](ctx, r.c,
		request{method: http.MethodPost, path: r.path + "/explain", body: body, json: true})
}

// ResetResult says what a reset of a router did.
type ResetResult struct {
	App   string `json:"app"`
	Ranks int    `json:"ranks"` // listed again
}

// Reset drops the router's state and requests a snapshot from every rank; it returns the number of ranks. It
// does not touch requests in flight.
func (r *RouterClient) Reset(ctx context.Context) (ranks int, err error) {
	out, err := ask[ResetResult](ctx, r.c, request{method: http.MethodPost, path: r.path + "/reset"})
	return out.Ranks, err
}

// Info describes an application's Router on this node.
type Info struct {
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
	Ejected       int      `json:"ejected,omitempty"` // their last answers failed
	// of Ejected: get nothing until a probe comes back
	LeftOut      int            `json:"left_out,omitempty"`
	Away         map[string]int `json:"away,omitempty"` // ranks by why they compute nothing: asleep, scaling
	Queued       int            `json:"queued"`
	Reservations int            `json:"reservations"`
	// open requests on the fullest ready rank over the mean; 1 = even
	Imbalance float64    `json:"imbalance"`
	Streams   Streams    `json:"streams"`
	Index     *Index     `json:"index,omitempty"`      // nil: the policy reads none
	CostModel *CostModel `json:"cost_model,omitempty"` // nil: the policy predicts no times
	// queues of lockstep groups, under the policy cohorts
	Groups []GroupQueue `json:"groups,omitempty"`
	// nil: the application has one pool. Else the rest is of the decode pool
	Pair *PairInfo `json:"pair,omitempty"`
}

// Streams says which streams go on from another rank when theirs dies or is taken away.
type Streams struct {
	Completions bool   `json:"completions"`
	Chat        bool   `json:"chat"`
	Why         string `json:"why,omitempty"` // why not all of them, or not yet
}

// GroupQueue is the queue of a lockstep group, as one node sees it.
type GroupQueue struct {
	Group   int    `json:"group"`
	Owner   string `json:"owner,omitempty"` // the node whose ingress has the queue; "" = not known yet
	Waiting int    `json:"waiting"`         // requests of this node's clients
	IsHere  bool   `json:"is_here"`         // this node's ingress has the queue; else the rest is not known

	Held          int     `json:"held"`                     // requests that wait, of all nodes
	Why           string  `json:"why,omitempty"`            // what the oldest of them waits for
	Open          int     `json:"open"`                     // requests that were released and have not ended
	PaceMs        float64 `json:"pace_ms,omitempty"`        // mean time between tokens; 0 = not known
	Rate          float64 `json:"rate"`                     // arrivals per second
	Ranks         int     `json:"ranks"`                    // that serve
	DecodeBalance float64 `json:"decode_balance,omitempty"` // mean decode time of the ranks over the longest
	Cohorts       Cohorts `json:"cohorts"`                  // since the queue began
	LastMinute    Cohorts `json:"last_minute"`
}

// Cohorts counts releases of prompts that enter a lockstep group together.
type Cohorts struct {
	Count    uint64 `json:"count"`
	Requests uint64 `json:"requests"`
	Ranks    uint64 `json:"ranks"` // that got prompts, summed over the cohorts
}

// Add adds another count.
func (c *Cohorts) Add(o Cohorts) {
	c.Count, c.Requests, c.Ranks = c.Count+o.Count, c.Requests+o.Requests, c.Ranks+o.Ranks
}

// CostModel is how long a Router expects its engines to take: the milliseconds of a preset, times what it
// measured beside them.
type CostModel struct {
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
	Ranks []WorkerSpeed `json:"ranks,omitempty"`
}

// WorkerSpeed is one rank beside the others of its application.
type WorkerSpeed struct {
	Worker string  `json:"worker"` // GROUP/RANK
	Slow   float64 `json:"slow"`   // how long it takes beside the median of all; 2 = twice as long
	// by what factor it must differ from the median to count as slower or faster: its speed is as uncertain
	Spread float64 `json:"spread,omitempty"`
	// how old its records are when they come to this node; 0 = not known
	LagMs float64 `json:"lag_ms,omitempty"`
}

// Info returns a description of the router.
func (r *RouterClient) Info(ctx context.Context) (Info, error) {
	return get[Info](ctx, r.c, r.path)
}
