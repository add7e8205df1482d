package cluster

import "github.com/dpserve/dpserve/state"

// WithStores lets a test stand between raft and its disk.
func (cfg Config) WithStores(wrap func(LogStore) LogStore) Config {
	cfg.Stores = wrap
	return cfg
}

// DecodeUpdate reads what Follow sends.
var DecodeUpdate = decodeUpdate

// State is the state that was read.
func (c *copied) State() *state.State { return c.state }
