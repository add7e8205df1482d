package sim

import "bytes"

// The failures of KV events. Where they strike single batches, rate and count limit them.
const (
	ModeKVDrop      Mode = "kv-drop"      // batches are not sent; the replay ring has them
	ModeKVDuplicate Mode = "kv-duplicate" // batches are sent twice
	ModeKVReorder   Mode = "kv-reorder"   // a batch is sent behind its successor
	ModeKVGarbage   Mode = "kv-garbage"   // batches arrive damaged; the replay ring has them whole
	ModeKVUnknown   Mode = "kv-unknown"   // batches hold an event of an unknown type
	// as if the engine had begun anew in its place: cache empty, numbers from the first, connections cut
	ModeKVRestart Mode = "kv-restart"
	// put to sleep: cache empty without any event, the sleep state says so
	ModeKVSleep       Mode = "kv-sleep"
	ModeKVNoReplay    Mode = "kv-no-replay"    // replay requests get no answer
	ModeKVShortReplay Mode = "kv-short-replay" // the ring holds two batches
	ModeKVSlowReplay  Mode = "kv-slow-replay"  // answers come 3 s apart
)

// damaged is a payload with its second half overwritten.
func damaged(payload []byte) []byte {
	out := bytes.Clone(payload)
	for i := len(out) / 2; i < len(out); i++ {
		out[i] = 0xc1 // what msgpack never uses
	}
	return out
}

// withUnknown puts an event of a type to come in front of a batch's events.
func withUnknown(payload []byte) []byte {
	const head = 1 + 9 // of the batch, and its time
	if len(payload) <= head || payload[head]&0xf0 != 0x90 || payload[head] == 0x9f {
		return payload // a long list: left alone
	}
	out := append([]byte{}, payload[:head]...)
	out = append(out, payload[head]+1, 0x92, 0xab)
	out = append(out, "BlockDreamt"...)
	out = append(out, 0x01)
	return append(out, payload[head+1:]...)
}

// restartKV restarts the engine's cache and events as a new process would: requests are computed again.
func (s *Server) restartKV() {
	for _, r := range s.ranks {
		r.mu.Lock()
		r.core.ResetPrefixCache(true, true)
		if r.kv != nil {
			r.kv.restart()
		}
		r.mu.Unlock()
		r.wake()
	}
}

// sleep drops the caches without an event; Recover ends it. The engine goes on computing.
func (s *Server) sleep(f Fault) {
	for _, r := range s.ranks {
		r.mu.Lock()
		r.core.ResetPrefixCache(true, true)
		r.mu.Unlock()
		r.wake()
	}
	s.faults.on(f, func() {})
}
