package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
)

// KVFormat is the shape of event batches, and with it the age of the engine that is imitated.
type KVFormat string

// The formats.
const (
	KVMap       KVFormat = "map"        // maps, replay replies of 4 frames
	KVArray     KVFormat = "array"      // arrays, replay replies of 3 frames: vLLM before June 2026
	KVOldSGLang KVFormat = "old-sglang" // arrays that end after lora_id, no rank, 3 frames
)

// KVHash is the wire type of block hashes.
type KVHash string

// The hash types.
const (
	KVUint  KVHash = "uint"  // low 64 bits
	KVInt   KVHash = "int"   // the same, signed
	KVBytes KVHash = "bytes" // the whole digest
)

// Defaults of KVEvents, the imitated engine's.
const (
	defaultKVEndpoint  = "tcp://*:5557"
	defaultKVBuffer    = 10000  // batches in the replay ring
	defaultKVHWM       = 100000 // batches that wait for one slow subscriber
	defaultKVQueueSize = 100000
	maxKVBuffer        = 1 << 20
)

const schemeTCP = "tcp://"

// KVEvents is --kv-events-config, and what the --sim-kv flags add to it.
type KVEvents struct {
	Enabled   bool   `json:"enable_kv_cache_events"`
	Publisher string `json:"publisher"`
	// bound where it has a *, on the host of the API; else dialled
	Endpoint     string  `json:"endpoint"`
	Replay       *string `json:"replay_endpoint"` // always bound; null = none
	BufferSteps  int     `json:"buffer_steps"`
	HWM          int     `json:"hwm"`
	MaxQueueSize int     `json:"max_queue_size"` // shown, not used: nothing is queued in front of the ring
	Topic        string  `json:"topic"`

	Format        KVFormat `json:"-"`
	Hash          KVHash   `json:"-"`
	FirstSeq      uint64   `json:"-"`
	SlidingWindow bool     `json:"-"` // a second KV group, whose events cannot be indexed
}

// defaultKVEvents is the engine's default: off.
func defaultKVEvents() KVEvents {
	return KVEvents{
		Endpoint: defaultKVEndpoint, BufferSteps: defaultKVBuffer, HWM: defaultKVHWM,
		MaxQueueSize: defaultKVQueueSize,
		Format:       KVMap, Hash: KVUint,
	}
}

// parse takes the JSON of --kv-events-config.
func (k *KVEvents) parse(text string) error {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(k); err != nil {
		return fmt.Errorf("want a JSON object of vLLM's kv events settings: %w", err)
	}
	if k.Publisher == "" {
		k.Publisher = "null"
		if k.Enabled {
			k.Publisher = "zmq"
		}
	}
	return k.validate()
}

// active reports that there is something to publish to.
func (k *KVEvents) active() bool { return k.Enabled && k.Publisher == "zmq" }

func (k *KVEvents) validate() error {
	switch {
	case k.Publisher != "" && k.Publisher != "zmq" && k.Publisher != "null":
		return fmt.Errorf("kv events publisher %q: want zmq or null", k.Publisher)
	case k.BufferSteps < 0 || k.BufferSteps > maxKVBuffer || k.HWM < 0:
		return fmt.Errorf("kv events buffer_steps %d, hwm %d: must not be negative, buffer_steps at most %d",
			k.BufferSteps, k.HWM, maxKVBuffer)
	}
	if !k.active() {
		return nil
	}
	if err := k.form(); err != nil {
		return err
	}
	_, err := k.at(0)
	return err
}

// form checks how events are written.
func (k *KVEvents) form() error {
	switch {
	case k.Format != KVMap && k.Format != KVArray && k.Format != KVOldSGLang:
		return fmt.Errorf("kv events format %q: want map, array or old-sglang", k.Format)
	case k.Hash != KVUint && k.Hash != KVInt && k.Hash != KVBytes:
		return fmt.Errorf("kv events hash type %q: want uint, int or bytes", k.Hash)
	}
	return nil
}

// sockets are the event sockets of one rank, the offset of its rank applied.
type sockets struct {
	endpoint, replay string // as they are told; replay "" = none
	publish, answer  string // host:port; * as host where there is a wildcard
	dials            bool
}

var errTCPOnly = errors.New("kv events endpoint: want tcp://HOST:PORT, other transports are not simulated")

func (k *KVEvents) at(rank int) (s sockets, err error) {
	if s.endpoint, s.publish, err = offset(k.Endpoint, rank); err != nil {
		return s, err
	}
	s.dials = !strings.Contains(k.Endpoint, "*") && !strings.Contains(k.Endpoint, "::")
	if k.Replay != nil {
		s.replay, s.answer, err = offset(*k.Replay, rank)
	}
	return s, err
}

// offset adds the rank to the port of an endpoint.
func offset(endpoint string, rank int) (told, addr string, err error) {
	rest, ok := strings.CutPrefix(endpoint, schemeTCP)
	if !ok {
		return "", "", errTCPOnly
	}
	host, text, err := net.SplitHostPort(rest)
	if err != nil {
		return "", "", fmt.Errorf("%w: %w", errTCPOnly, err)
	}
	port, err := strconv.Atoi(text)
	if err != nil || port < 0 || port+rank > 65535 {
		return "", "", fmt.Errorf("%w: %s has no such port for rank %d", errTCPOnly, endpoint, rank)
	}
	if port > 0 { // 0 = any, for tests
		port += rank
	}
	addr = net.JoinHostPort(host, strconv.Itoa(port))
	return schemeTCP + addr, addr, nil
}
