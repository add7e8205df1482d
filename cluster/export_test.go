package cluster

// LogStore is what raft writes to.
type LogStore = logStore

// WithStores lets a test stand between raft and its disk.
func (cfg Config) WithStores(wrap func(LogStore) LogStore) Config {
	cfg.stores = wrap
	return cfg
}

// DecodeUpdate reads what Follow sends.
var DecodeUpdate = decodeUpdate
