package sim

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	em "github.com/dpserve/dpserve/internal/enginemodel"
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

	Hash          KVHash `json:"-"`
	FirstSeq      uint64 `json:"-"`
	SlidingWindow bool   `json:"-"` // a second KV group, whose events cannot be indexed
}

// defaultKVEvents is the engine's default: off.
func defaultKVEvents() KVEvents {
	return KVEvents{
		Endpoint: defaultKVEndpoint, BufferSteps: defaultKVBuffer, HWM: defaultKVHWM,
		MaxQueueSize: defaultKVQueueSize, Hash: KVUint,
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
	_, err := k.at(0)
	return err
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
	addr = hostPort(host, port)
	return schemeTCP + addr, addr, nil
}

// Connector is the way in which blocks come from a prefill engine to a decode engine.
type Connector string

// The connectors, by the names of --kv-transfer-config.
const (
	ConnectorNone Connector = ""
	ConnectorNixl Connector = "NixlConnector"
)

// The roles of a connector. NIXL does not enforce them.
const (
	RoleProducer = "kv_producer"
	RoleConsumer = "kv_consumer"
	RoleBoth     = "kv_both"
)

// Defaults of KVTransfer.
const (
	// DefaultTokenBytes is the KV of one token of the reference model, Qwen3-32B in bf16: 64 layers, 8 KV
	// heads, 128 dimensions, keys and values.
	DefaultTokenBytes   = 64 * 8 * 128 * 2 * 2
	defaultGBps         = 25.0 // a network card of 200 Gbit/s
	defaultFirstContact = 500 * time.Millisecond
	defaultHandshakeMax = 5 * time.Second
)

// KVTransfer says how this engine moves blocks: --kv-transfer-config, what the --sim-transfer flags add to
// it, and the environment.
type KVTransfer struct {
	Connector Connector
	Role      string
	EngineID  string        // "" = a random one for each start
	Recompute bool          // kv_load_failure_policy: compute what could not be loaded, instead of failing
	Lease     time.Duration // kv_lease_duration; 0 = the connector's default

	SideHost string // where the side channel listens, and what is told of it; "" = the API's host
	SidePort int    // its port for rank 0, the others add their rank; 0 = any free one

	TokenBytes   int           // KV of one token
	GBps         float64       // what a prefill rank sends, in 10^9 bytes per second
	FirstContact time.Duration // of two engines, behind their handshake
	HandshakeMax time.Duration // an engine that does not answer by then has failed
}

// defaultKVTransfer is no connector.
func defaultKVTransfer() KVTransfer {
	return KVTransfer{
		TokenBytes: DefaultTokenBytes, GBps: defaultGBps, FirstContact: defaultFirstContact,
		HandshakeMax: defaultHandshakeMax,
	}
}

// parse takes the JSON of --kv-transfer-config. Settings that a simulation cannot use are accepted.
func (k *KVTransfer) parse(text string) error {
	var in struct {
		Connector string          `json:"kv_connector"`
		EngineID  *string         `json:"engine_id"`
		Role      *string         `json:"kv_role"`
		Policy    string          `json:"kv_load_failure_policy"`
		Extra     json.RawMessage `json:"kv_connector_extra_config"`

		Device   any `json:"kv_buffer_device"`
		Size     any `json:"kv_buffer_size"`
		Rank     any `json:"kv_rank"`
		Parallel any `json:"kv_parallel_size"`
		IP       any `json:"kv_ip"`
		Port     any `json:"kv_port"`
		Module   any `json:"kv_connector_module_path"`
		Permute  any `json:"enable_permute_local_kv"`
	}
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return fmt.Errorf("want a JSON object of vLLM's kv transfer settings: %w", err)
	}
	var extra struct {
		Lease *float64 `json:"kv_lease_duration"`
	}
	if len(in.Extra) > 0 {
		if err := json.Unmarshal(in.Extra, &extra); err != nil {
			return fmt.Errorf("kv_connector_extra_config: %w", err)
		}
	}
	switch in.Policy {
	case "", "fail", "recompute":
	default:
		return fmt.Errorf("kv_load_failure_policy %q: want fail or recompute", in.Policy)
	}
	if in.Connector == "NixlPullConnector" {
		in.Connector = string(ConnectorNixl)
	}
	k.Connector, k.Recompute = Connector(in.Connector), in.Policy == "recompute"
	if in.EngineID != nil {
		k.EngineID = *in.EngineID
	}
	if in.Role != nil {
		k.Role = *in.Role
	}
	if extra.Lease != nil {
		if *extra.Lease <= 0 || *extra.Lease > 1e6 {
			return fmt.Errorf("kv_lease_duration %v: want seconds above 0", *extra.Lease)
		}
		k.Lease = time.Duration(*extra.Lease * float64(time.Second))
	}
	return k.validate()
}

func (k *KVTransfer) validate() error {
	switch k.Connector {
	case ConnectorNone:
		return nil
	case ConnectorNixl:
	default:
		return fmt.Errorf("kv_connector %q: the simulated engine has %s only", k.Connector, ConnectorNixl)
	}
	switch {
	case k.Role != RoleProducer && k.Role != RoleConsumer && k.Role != RoleBoth:
		return fmt.Errorf("kv_role %q: want %s, %s or %s", k.Role, RoleProducer, RoleConsumer, RoleBoth)
	case k.TokenBytes < 1 || !(k.GBps > 0):
		return fmt.Errorf("transfer of %d bytes per token at %v GB/s: both must be above 0", k.TokenBytes,
			k.GBps)
	case k.Lease < 0 || k.FirstContact < 0 || k.HandshakeMax <= 0:
		return errors.New("the times of a transfer must not be negative, that of a handshake above 0")
	}
	return nil
}

// active reports whether the engine moves blocks at all.
func (k *KVTransfer) active() bool { return k.Connector != ConnectorNone }

// lease is how long the blocks of an ended prefill leg are kept.
func (k *KVTransfer) lease() time.Duration { return cmp.Or(k.Lease, em.DefaultLease) }

// transferTime is how long a prefill rank needs to send that many blocks.
func (c *Config) transferTime(blocks int) time.Duration {
	seconds := float64(c.transferBytes(blocks)) / (c.Transfer.GBps * 1e9)
	return time.Duration(seconds * float64(time.Second) / c.Model.Speed)
}

// transferBytes counts whole blocks, as the engines move them.
func (c *Config) transferBytes(blocks int) int {
	return blocks * c.Model.BlockSize * c.Transfer.TokenBytes
}

// compat is what two engines must share to pair: version, model as it is written, and the form of the blocks.
func (c *Config) compat() string {
	return fmt.Sprintf("%s %s block_size=%d token_bytes=%d %s", Version, cmp.Or(c.Root, c.Names[0]),
		c.Model.BlockSize, c.Transfer.TokenBytes, c.Transfer.Connector)
}

// sideHost is where the side channel listens.
func (c *Config) sideHost() string { return cmp.Or(c.Transfer.SideHost, c.Host) }

// sideAddr is where the side channel of the rank of that number listens.
func (c *Config) sideAddr(rank int) string {
	port := c.Transfer.SidePort
	if port > 0 {
		port += rank
	}
	return hostPort(c.sideHost(), port)
}

// transferFromEnv honours the variables of the imitated engine.
func transferFromEnv(k *KVTransfer) error {
	if host := os.Getenv("VLLM_NIXL_SIDE_CHANNEL_HOST"); host != "" {
		k.SideHost = host
	}
	const name = "VLLM_NIXL_SIDE_CHANNEL_PORT"
	text := os.Getenv(name)
	if text == "" {
		return nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > 65535 {
		return fmt.Errorf("%s is %q: want a port", name, text)
	}
	k.SidePort = n
	return nil
}
