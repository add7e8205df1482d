package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
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

// Models asks /v1/models. At least one entry, or an error.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	b, err := c.get(ctx, "/v1/models", maxAnswer)
	if err != nil {
		return nil, err
	}
	return parseModels(b)
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

// MaxModelLen asks /v1/models how many tokens a request and its answer may have together; 0 where that is not
// told.
func (c *Client) MaxModelLen(ctx context.Context) (int, error) {
	models, err := c.Models(ctx)
	if err != nil {
		return 0, err
	}
	return sane(float64(models[0].MaxModelLen), maxModelLen), nil
}

// Version asks /version; "" with an error where the engine has none.
func (c *Client) Version(ctx context.Context) (string, error) {
	b, err := c.get(ctx, "/version", maxAnswer)
	if err != nil {
		return "", err
	}
	var v struct {
		Version string `json:"version"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return "", fmt.Errorf("/version: %w", err)
	}
	return v.Version, nil
}

// Settings are what the ranks of a lockstep unit must agree on, as the engine reports it after its start: it
// may have changed what it was given.
type Settings struct {
	Model       string
	MaxModelLen int
	BlockSize   int // 0 = not told
}

// ReadBack asks for the settings in force. The block size is left 0 if /metrics does not tell it.
func (c *Client) ReadBack(ctx context.Context) (Settings, error) {
	models, err := c.Models(ctx)
	if err != nil {
		return Settings{}, err
	}
	s := Settings{Model: models[0].ID, MaxModelLen: models[0].MaxModelLen}
	if n, err := c.Counters(ctx); err == nil {
		s.BlockSize = n.BlockSize
	}
	return s, nil
}

// Cache is an engine's KV cache as it reports it. What is not told is zero.
type Cache struct {
	BlockSize  int  // tokens per block
	Blocks     int  // blocks on the device
	CachingOff bool // it runs without prefix caching
}

// Cache asks /metrics, and SGLang, which need not have that, /server_info. The error says why not all is
// known.
func (c *Client) Cache(ctx context.Context) (Cache, error) {
	p, err := c.metrics(ctx)
	out := Cache{BlockSize: p.BlockSize, Blocks: p.Blocks, CachingOff: p.CachingOff}
	if !p.sglang && out.BlockSize > 0 {
		return out, nil
	}
	b, infoErr := c.get(ctx, "/server_info", maxAnswer)
	var s *StatusError
	if errors.As(infoErr, &s) && s.Status == http.StatusNotFound {
		b, infoErr = c.get(ctx, "/get_server_info", maxAnswer) // its older name
	}
	if infoErr != nil {
		return out, errors.Join(err, infoErr)
	}
	told := parseServerInfo(b)
	return Cache{
		BlockSize: cmp.Or(out.BlockSize, told.BlockSize), Blocks: cmp.Or(out.Blocks, told.Blocks),
			CachingOff: out.CachingOff || told.CachingOff,
	}, nil
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
