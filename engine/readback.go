package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// ErrNoModels says that an engine lists no model.
var ErrNoModels = errors.New("/v1/models lists no model")

// Model is one entry of an engine's /v1/models.
type Model struct {
	ID          string `json:"id"`
	OwnedBy     string `json:"owned_by"`
	Parent      string `json:"parent"`        // set for an adapter
	MaxModelLen int    `json:"max_model_len"` // 0 = not told
}

func parseModels(b []byte) ([]Model, error) {
	var list struct {
		Data []Model `json:"data"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("/v1/models: %w", err)
	}
	if len(list.Data) == 0 {
		return nil, ErrNoModels
	}
	return list.Data, nil
}

// maxModelLen bounds what is believed of an engine's max_model_len, in tokens.
const maxModelLen = 1 << 30

// Settings are what the ranks of a lockstep unit must agree on, as the engine reports it after its start: it
// may have changed what it was given.
type Settings struct {
	Model       string
	MaxModelLen int
	BlockSize   int // 0 = not told
}

// Cache is an engine's KV cache as it reports it. What is not told is zero.
type Cache struct {
	BlockSize  int  // tokens per block
	Blocks     int  // blocks on the device
	CachingOff bool // it runs without prefix caching
}

// parseServerInfo reads what SGLang says of its cache. Another engine's answer, or none that can be read,
// says nothing.
func parseServerInfo(b []byte) Cache {
	var info struct {
		PageSize  float64 `json:"page_size"`
		MaxTokens float64 `json:"max_total_num_tokens"`
		RadixOff  bool    `json:"disable_radix_cache"`
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return Cache{}
	}
	c := Cache{BlockSize: sane(info.PageSize, maxBlockSize), CachingOff: info.RadixOff}
	if c.BlockSize > 0 {
		c.Blocks = sane(math.Floor(info.MaxTokens/info.PageSize), maxBlocks)
	}
	return c
}
