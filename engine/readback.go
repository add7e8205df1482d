package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// Settings are what the ranks of a lockstep unit must agree on, as the engine reports it after its start: it may have changed
// what it was given.
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
