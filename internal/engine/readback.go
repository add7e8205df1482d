package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
)

// errNoModels reports that an engine lists no model.
var errNoModels = errors.New("/v1/models lists no model")

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
		return nil, errNoModels
	}
	return list.Data, nil
}

// maxModelLen is the largest max_model_len that is accepted from an engine, in tokens.
const maxModelLen = 1 << 30

// Settings must be equal on all ranks of a lockstep unit. They are read from the engine after its start,
// because the engine may change the settings that it is given.
type Settings struct {
	Model       string
	MaxModelLen int
	BlockSize   int // 0 = not told
}

// Cache is an engine's KV cache as the engine reports it. Unknown values are zero.
type Cache struct {
	BlockSize  int  // tokens per block
	Blocks     int  // blocks on the device
	CachingOff bool // it runs without prefix caching
}

// parseServerInfo reads SGLang's settings of its cache. The answer of another engine, or one that cannot be
// parsed, yields nothing.
func parseServerInfo(b []byte) Cache {
	var info struct {
		PageSize  float64 `json:"page_size"`
		MaxTokens float64 `json:"max_total_num_tokens"`
		RadixOff  bool    `json:"disable_radix_cache"`
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return Cache{}
	}
	c := Cache{BlockSize: toCount(info.PageSize, maxBlockSize), CachingOff: info.RadixOff}
	if c.BlockSize > 0 {
		c.Blocks = toCount(math.Floor(info.MaxTokens/info.PageSize), maxBlocks)
	}
	return c
}
