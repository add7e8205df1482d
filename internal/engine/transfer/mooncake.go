package transfer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/dispatch"
)

// mooncake is vLLM's MooncakeConnector: both legs start at once and meet by a transfer id; the prefill engine
// writes the blocks. It keeps them only if its leg ends by its length, so that leg has no stop and ignores
// the end-of-text token. A decode leg that lacks a key waits without an end.
type mooncake struct{}

// mooncakeTraits leave out the routes that do not know ignore_eos: a first token that ends the text would
// free the blocks.
var mooncakeTraits = Traits{
	Name: MooncakeName, Order: dispatch.Together, TakesPlain: true,
	limits: true, toLength: true,
}

func (mooncake) Traits() *Traits { return &mooncakeTraits }

func (mooncake) Begin(_ *Request, id string, p Peer, _ func(n uint64) uint64) (Attempt, error) {
	if id == "" {
		return Attempt{}, incomplete(MooncakeName, "transfer id")
	}
	if p.EngineID == "" {
		return Attempt{}, incomplete(MooncakeName, "engine id, which its bootstrap server tells")
	}
	if _, _, err := bootstrapURL(MooncakeName, p.Bootstrap); err != nil {
		return Attempt{}, err
	}
	transferID := `,"transfer_id":` + quoted("xfer-"+id)
	prefill := kvParams + `{"do_remote_decode":true,"do_remote_prefill":false` + transferID + `}`
	decode := kvParams + `{"do_remote_decode":false,"do_remote_prefill":true` + transferID +
		`,"remote_engine_id":` + quoted(p.EngineID) +
		`,"remote_bootstrap_addr":` + quoted(strings.TrimSuffix(p.Bootstrap, "/")) + `}`
	return Attempt{ID: id, prefill: []byte(prefill), decode: []byte(decode)}, nil
}

// Check implements Transfer. The answer holds no parameters.
func (mooncake) Check(a *Answer) Failure {
	switch a.Ending {
	case EndedByLength:
		return NoFailure
	case EndedByStop:
		return PrefillStopped
	default:
		return PrefillBroken
	}
}

func (mooncake) Query(address string) (Query, error) {
	return bootstrapQuery(MooncakeName, address, "/query")
}

// ReadPeer implements Bootstrapper. The answer names the engine of each data-parallel rank.
func (mooncake) ReadPeer(address string, rank, status int, answer []byte) (Peer, error) {
	if err := checkStatus(status, answer); err != nil {
		return Peer{}, err
	}
	var ranks map[string]struct {
		EngineID string                     `json:"engine_id"`
		Workers  map[string]json.RawMessage `json:"worker_addr"`
	}
	if err := json.Unmarshal(answer, &ranks); err != nil {
		return Peer{}, fmt.Errorf("%w: %w", ErrBootstrap, err)
	}
	r, ok := ranks[strconv.Itoa(rank)]
	switch {
	case !ok || len(r.Workers) == 0:
		return Peer{}, ErrNotRegistered
	case r.EngineID == "":
		return Peer{}, fmt.Errorf("%w: rank %d has no engine_id", ErrBootstrap, rank)
	}
	return Peer{EngineID: r.EngineID, Bootstrap: strings.TrimSuffix(address, "/"), Rank: rank}, nil
}
