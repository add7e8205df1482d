package sim

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"github.com/dpserve/dpserve/internal/engine/kvevents/zmtp"
	em "github.com/dpserve/dpserve/internal/enginemodel"
	"github.com/dpserve/dpserve/test/ports"
)

// replayFixture is a captured replay: the request's frames, and those of each reply.
func replayFixture(t *testing.T, name string) (request [][]byte, replies [][][]byte) {
	t.Helper()
	f, err := os.Open(filepath.Join("..", "kvevents", "testdata", "v0.32.0", name))
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var line struct {
			Dir    string
			Frames []string `json:"frames_hex"`
		}
		require.NoError(t, json.Unmarshal(in.Bytes(), &line))
		var frames [][]byte
		for _, text := range line.Frames {
			frame, err := hex.DecodeString(text)
			require.NoError(t, err)
			frames = append(frames, frame)
		}
		if line.Dir == "request" {
			request = frames
		} else {
			replies = append(replies, frames)
		}
	}
	require.NoError(t, in.Err())
	return request, replies
}

// askReplay sends the request of a fixture to a rank and returns the replies up to the end marker.
func askReplay(t *testing.T, s *Server, r *rank, request [][]byte) (replies [][][]byte) {
	t.Helper()
	addr := kvAddr(s, r.kv.sockets.replay)
	c, err := zmtp.Dial(t.Context(), nil, addr, zmtp.Dealer, zmtp.DefaultLimits())
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.Send(request...))
	for len(replies) == 0 || !isReplayEnd(replies[len(replies)-1]) {
		frames, err := c.Recv()
		require.NoError(t, err)
		replies = append(replies, frames)
	}
	return replies
}

func isReplayEnd(frames [][]byte) bool {
	return len(frames) > 2 && bytes.Equal(frames[2], bytes.Repeat([]byte{0xff}, 8))
}

// msgpackShape is a message without what it says: keys in order, kinds, and the words that name kinds of
// events.
func msgpackShape(t *testing.T, d *msgpack.Decoder) string {
	t.Helper()
	code, err := d.PeekCode()
	require.NoError(t, err)
	switch {
	case msgpcode.IsFixedArray(code), code == msgpcode.Array16, code == msgpcode.Array32:
		n, err := d.DecodeArrayLen()
		require.NoError(t, err)
		var parts []string
		for range n {
			if p := msgpackShape(t, d); len(parts) == 0 || parts[len(parts)-1] != p {
				parts = append(parts, p)
			}
		}
		return "[" + strings.Join(parts, " ") + "]"
	case msgpcode.IsFixedMap(code), code == msgpcode.Map16, code == msgpcode.Map32:
		n, err := d.DecodeMapLen()
		require.NoError(t, err)
		var parts []string
		for range n {
			key, err := d.DecodeString()
			require.NoError(t, err)
			parts = append(parts, key+":"+msgpackShape(t, d))
		}
		return "{" + strings.Join(parts, " ") + "}"
	}
	v, err := d.DecodeInterface()
	require.NoError(t, err)
	switch v := v.(type) {
	case string:
		return v
	case nil:
		return "nil"
	case float64, []byte:
		return fmt.Sprintf("%T", v)
	}
	return "integer"
}

// FS14: A replay has the captured frames and events: topic, number, end marker, keys in order, kinds of
// hashes.
func TestKVReplayGoldens(t *testing.T) {
	for name, edit := range map[string]func(*Config){
		"dense_default_replay_from_0.jsonl":     func(*Config) {},
		"dense_default_replay_beyond_end.jsonl": func(*Config) {},
		"bytes_hash_replay_from_0.jsonl": func(c *Config) {
			c.KVEvents.Topic, c.KVEvents.Hash = "t", KVBytes
		},
		"sha256_cbor_replay_from_0_ring12.jsonl": func(c *Config) {
			c.Hashing = em.Hashing{Algo: em.HashSHA256CBOR, Root: em.RootOf("0")}
			c.KVEvents.Topic, c.KVEvents.BufferSteps = "kv@127.0.0.1:18100@tiny", 12
		},
		"dense_internal_lb_r0_replay.jsonl": func(c *Config) { c.InternalLB = 2 },
		"dense_internal_lb_r1_replay.jsonl": func(c *Config) { c.InternalLB = 2 },
		"moe_external_lb_r0_replay.jsonl":   func(c *Config) { c.RPCAddr = ports.TakeAddr(t) },
		"moe_external_lb_r1_replay.jsonl":   func(c *Config) { c.RPCAddr = ports.TakeAddr(t) },
	} {
		t.Run(name, func(t *testing.T) {
			c := kvConfig()
			edit(&c)
			number := 0
			if strings.Contains(name, "_r1_") {
				number = 1
			}
			s, r, header := startOne(t, c, number)
			salt := ""
			if strings.HasPrefix(name, "sha256_cbor") {
				salt = "tenant-1" // of the first event that the captured ring still had
			}
			ids := em.AppendTokens(nil, strings.Repeat("all the words of a prompt ", 40))
			status, body := ask(t, s, "/v1/completions", fmt.Sprintf(
				`{"prompt":%s,"max_tokens":1,"cache_salt":%q}`, mustMarshal(ids), salt),
				"X-data-parallel-rank", header)
			require.Equal(t, 200, status, body)
			request, want := replayFixture(t, name)
			var got [][][]byte
			eventually(t, func() bool {
				got = askReplay(t, s, r, request)
				return len(got) > 1 || len(want) == 1
			})
			require.True(t, isReplayEnd(want[len(want)-1]))
			assert.Equal(t, want[len(want)-1], got[len(got)-1], "the end marker")
			if len(want) == 1 {
				assert.Len(t, got, 1)
				return
			}
			first, theirs := got[0], want[0]
			require.Len(t, first, len(theirs))
			assert.Equal(t, theirs[:2], first[:2], "the empty frame and the topic")
			assert.Len(t, first[2], len(theirs[2]), "the number")
			assert.Equal(t, shapeOfBatch(t, theirs[3]), shapeOfBatch(t, first[3]))
		})
	}
}

// startOne starts an engine, or both of a group, and returns the rank of a number and the header that names
// it.
func startOne(t *testing.T, c Config, number int) (s *Server, r *rank, header string) {
	t.Helper()
	if c.RPCAddr == "" {
		if c.InternalLB > 1 { // every rank has sockets of its own, at the next port
			c.KVEvents.Endpoint = fmt.Sprintf("tcp://*:%d", ports.Take(t, 2))
			replay := fmt.Sprintf("tcp://127.0.0.1:%d", ports.Take(t, 2))
			c.KVEvents.Replay = &replay
		}
		s = start(t, c)
		return s, s.ranks[number], strconv.Itoa(number)
	}
	c.KVEvents.Endpoint = fmt.Sprintf("tcp://*:%d", ports.Take(t, 2))
	replay := fmt.Sprintf("tcp://127.0.0.1:%d", ports.Take(t, 2))
	c.KVEvents.Replay = &replay
	group, err := startGroup(t.Context(), c, 2)
	require.NoError(t, err)
	for _, one := range group {
		t.Cleanup(func() { assert.NoError(t, one.Close()) })
	}
	return group[number], group[number].ranks[0], "0"
}

// shapeOfBatch is the shape of a batch with its first event.
func shapeOfBatch(t *testing.T, payload []byte) string {
	t.Helper()
	d := msgpack.NewDecoder(bytes.NewReader(payload))
	members, err := d.DecodeArrayLen()
	require.NoError(t, err)
	at := msgpackShape(t, d)
	events, err := d.DecodeArrayLen()
	require.NoError(t, err)
	require.Positive(t, events)
	return fmt.Sprintf("%d members: %s, events %s", members, at, msgpackShape(t, d))
}
