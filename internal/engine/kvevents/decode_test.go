package kvevents

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// record is a Sink that writes everything down.
type record []string

func (l *record) Stored(ev *Stored) {
	*l = append(*l, fmt.Sprintf("S %v parent=%v tokens=%v bs=%d medium=%s lora=%s/%d group=%d kind=%s "+
		"extra=%x",
		ev.Hashes, ev.Parent, ev.Tokens, ev.BlockSize, ev.Medium, ev.LoraName, ev.LoraID, ev.Group, ev.Kind,
		ev.Extra))
}

func (l *record) Removed(ev *Removed) {
	*l = append(*l, fmt.Sprintf("R %v medium=%s group=%d", ev.Hashes, ev.Medium, ev.Group))
}
func (l *record) Cleared()           { *l = append(*l, "C") }
func (l *record) Reset(partial bool) { *l = append(*l, fmt.Sprintf("reset partial=%v", partial)) }

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	require.NoError(t, err)
	return b
}

func decodeAll(t testing.TB, payload []byte) (batchInfo, record) {
	t.Helper()
	var d batchDecoder
	b, err := d.Decode(payload)
	require.NoError(t, err)
	var got record
	d.Deliver(&got, nil)
	return b, got
}

// The golden payloads of the format, one per shape. h is block 0 of the sha256_cbor chain.
var goldens = map[string]string{
	"map stored": "93cb3ff8000000000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368" +
		"657391cfb0147556276afc9cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa" +
		"626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa6578" +
		"7472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae6675" +
		"6c6c5f617474656e74696f6e00",
	"array stored": "93cb3ff80000000000009197ab426c6f636b53746f72656491cfb0147556276afc9cc09401020304" +
		"04c0a347505500",
	"map removed": "93cb3ff80000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173" +
		"68657391cfb0147556276afc9ca66d656469756da3475055a967726f75705f6964780000",
	"array rm+clear": "93cb3ff80000000000009293ac426c6f636b52656d6f76656491cfb0147556276afc9ca347505591" +
		"b0416c6c426c6f636b73436c656172656400",
	"old sglang": "92cb3ff80000000000009196ab426c6f636b53746f72656491d3cf97adeedb59e05bc0940102030404c0",
}

// KV1: payloads of vLLM and SGLang, as maps and as arrays, decode to their events.
func TestGoldenPayloads(t *testing.T) {
	const stored = "S [12687895063098490012] parent=none tokens=[1 2 3 4] bs=4 medium=GPU lora=/-1 group=0 " +
		"kind=%s extra=[]"
	for name, want := range map[string]record{
		"map stored":     {fmt.Sprintf(stored, "full_attention")},
		"array stored":   {fmt.Sprintf(stored, "")},
		"map removed":    {"R [12687895063098490012] medium=GPU group=0"},
		"array rm+clear": {"R [12687895063098490012] medium=GPU group=0", "C"},
		"old sglang": {"S [-3488128144981237669] parent=none tokens=[1 2 3 4] bs=4 medium= lora=/-1 " +
			"group=0 kind= extra=[]"},
	} {
		t.Run(name, func(t *testing.T) {
			batch, got := decodeAll(t, unhex(t, goldens[name]))
			assert.InDelta(t, 1.5, batch.TS, 0)
			assert.Equal(t, map[bool]int{true: -1, false: 0}[name == "old sglang"], batch.Rank)
			assert.Equal(t, want, got)
		})
	}
}

// captured is one line of a fixture.
type captured struct {
	Note    string   `json:"note"`
	Dir     string   `json:"dir"`
	Frames  []string `json:"frames_hex"`
	Payload string   `json:"payload_hex"`
	Seq     uint64   `json:"seq"`
	End     bool     `json:"end"`
	Decoded []any    `json:"decoded"`
}

func fixture(t testing.TB, file string) []captured {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	var out []captured
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var c captured
		d := json.NewDecoder(bytes.NewReader(in.Bytes()))
		d.UseNumber()
		require.NoError(t, d.Decode(&c))
		if c.Dir == "reply" && !c.End {
			c.Payload = c.Frames[len(c.Frames)-1] // SGLang before 0.5.20 has no topic here
		}
		out = append(out, c)
	}
	require.NoError(t, in.Err())
	return out
}

// wantOf writes a decoded fixture down as record does.
func wantOf(event map[string]any) string {
	list := func(v any) (out []string) {
		for _, h := range v.([]any) {
			out = append(out, hashText(h))
		}
		return out
	}
	switch event["type"] {
	case "AllBlocksCleared":
		return "C"
	case "BlockRemoved":
		return fmt.Sprintf("R %v medium=%v group=%v", list(event["block_hashes"]), event["medium"],
			event["group_idx"])
	}
	extra := ""
	for _, k := range event["extra_keys"].([]any) {
		raw := ""
		if k != nil {
			b, _ := msgpack.Marshal(k)
			raw = hex.EncodeToString(b)
		}
		extra += " " + raw
	}
	return fmt.Sprintf("S %v parent=%v tokens=%v bs=%v medium=%v lora=/-1 group=%v kind=%v extra=[%s]",
		list(event["block_hashes"]),
		hashText(event["parent_block_hash"]), event["token_ids"], event["block_size"], event["medium"],
		event["group_idx"],
		event["kv_cache_spec_kind"], strings.TrimPrefix(extra, " "))
}

func hashText(v any) string {
	switch h := v.(type) {
	case nil:
		return "none"
	case map[string]any:
		return h["bin"].(string)
	}
	return fmt.Sprint(v)
}

// KV1: every batch that was captured from vLLM 0.32.0 decodes as vLLM itself decoded it.
func TestCapturedBatches(t *testing.T) {
	files, err := filepath.Glob("testdata/v0.32.0/*.jsonl")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	batches := 0
	for _, file := range files {
		for _, c := range fixture(t, file) {
			if c.Payload == "" {
				continue
			}
			batches++
			batch, got := decodeAll(t, unhex(t, c.Payload))
			require.Len(t, got, len(c.Decoded[1].([]any)), file)
			for i, event := range c.Decoded[1].([]any) {
				assert.Equal(t, wantOf(event.(map[string]any)), got[i], "%s seq %d", file, c.Seq)
			}
			assert.Equal(t, fmt.Sprint(c.Decoded[2]), fmt.Sprint(batch.Rank))
			assert.Zero(t, batch.Malformed+batch.Unknown)
		}
	}
	assert.Greater(t, batches, 60)
}

// pack builds payloads for the tests.
func pack(t testing.TB, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	require.NoError(t, err)
	return b
}

type list = []any

type dict = map[string]any

func stored(hashes list, parent any, tokens int, more ...any) list {
	ids := list{}
	for i := range tokens {
		ids = append(ids, i)
	}
	return append(list{"BlockStored", hashes, parent, ids, 2}, more...)
}

func TestBothShapesAndAllHashTypesMakeOneSequence(t *testing.T) {
	raw := bytes.Repeat([]byte{9}, 32)
	short := bytes.Repeat([]byte{8}, 16)
	batch := list{
		1.5, list{
			stored(list{uint64(1<<63 + 5)}, nil, 2),
			dict{
				"type": "BlockStored", "block_hashes": list{-7}, "parent_block_hash": uint64(1<<63 + 5),
				"token_ids": list{1, 2}, "block_size": 2, "later": dict{"a": list{1}},
			},
			stored(list{raw}, short, 2, nil, "CPU", nil, nil, 0, "mla_attention", nil, "LOCAL",
				"from the future", 7),
			list{"BlockRemoved", list{raw, 3}, "CPU"},
			dict{"type": "BlockRemoved", "block_hashes": list{}},
			list{"SomethingNew", 1, 2},
			dict{"type": "Else"},
			17,
			list{"AllBlocksCleared"},
			dict{"type": "AllBlocksCleared"},
		}, 3, "more", dict{},
	}
	got, events := decodeAll(t, pack(t, batch))
	assert.Equal(t, batchInfo{TS: 1.5, Rank: 3, Events: 7, Unknown: 3, UnknownMembers: 3}, got)
	assert.Equal(t, record{
		"S [9223372036854775813] parent=none tokens=[0 1] bs=2 medium= lora=/-1 group=0 kind= extra=[]",
		"S [-7] parent=9223372036854775813 tokens=[1 2] bs=2 medium= lora=/-1 group=0 kind= extra=[]",
		"S [" + strings.Repeat("09", 32) + "] parent=" + strings.Repeat("08", 16) +
			" tokens=[0 1] bs=2 medium=CPU lora=/-1 group=0 kind=mla_attention extra=[]",
		"R [" + strings.Repeat("09", 32) + " 3] medium=CPU group=0", "C", "C",
	}, events)
}

func TestHashesOfDifferentTypesDiffer(t *testing.T) {
	eight := make([]byte, 8)
	binary.BigEndian.PutUint64(eight, math.MaxUint64)
	raw, ok := BytesHash(eight)
	require.True(t, ok)
	all := []Hash{UintHash(math.MaxUint64), IntHash(-1), raw, {}}
	for i, a := range all {
		for j, b := range all {
			assert.Equal(t, i == j, a == b)
		}
	}
	assert.Equal(t, UintHash(7), IntHash(7), "a value is one name, whatever its encoding")
}

func TestEventsThatContradictThemselvesAreDroppedAlone(t *testing.T) {
	good := stored(list{1}, nil, 2)
	for name, ev := range map[string]any{
		"self parent":       stored(list{5}, 5, 2),
		"parent inside":     stored(list{4, 5}, 5, 4),
		"same hash twice":   stored(list{5, 5}, 4, 4),
		"too few tokens":    stored(list{5}, nil, 1),
		"too many tokens":   stored(list{5}, nil, 3),
		"negative token":    list{"BlockStored", list{5}, nil, list{1, -1}, 2},
		"huge token":        list{"BlockStored", list{5}, nil, list{1, uint64(1) << 32}, 2},
		"block size 0":      list{"BlockStored", list{5}, nil, list{1, 2}, 0},
		"block size 2^31":   list{"BlockStored", list{5}, nil, list{1, 2}, 1 << 31},
		"negative size":     list{"BlockStored", list{5}, nil, list{1, 2}, -2},
		"hash of 33 bytes":  stored(list{make([]byte, 33)}, nil, 2),
		"empty hash":        stored(list{[]byte{}}, nil, 2),
		"text hash":         stored(list{"5"}, nil, 2),
		"no hashes":         list{"BlockStored"},
		"hashes no list":    list{"BlockStored", 5, nil, list{1, 2}, 2},
		"map, no hashes":    dict{"type": "BlockStored", "block_size": 2},
		"extra of 2 blocks": stored(list{5}, nil, 2, nil, "GPU", nil, list{nil, nil}),
		"group 64":          stored(list{5}, nil, 2, nil, "GPU", nil, list{nil}, 64),
		"negative group":    stored(list{5}, nil, 2, nil, "GPU", nil, list{nil}, -1),
	} {
		t.Run(name, func(t *testing.T) {
			batch, got := decodeAll(t, pack(t, list{1.5, list{good, ev, good}, 0}))
			assert.Equal(t, 1, batch.Malformed)
			assert.Len(t, got, 2, "its neighbours stay")
		})
	}
}

func TestBatchesThatCannotBeTrusted(t *testing.T) {
	whole := unhex(t, goldens["map stored"])
	cases := map[string][]byte{
		"empty": {}, "nil": {0xc0}, "no array": pack(t, dict{"a": 1}), "too short": pack(t, list{1.5}),
		"no time": pack(t, list{"x", list{}}),
		"NaN":     pack(t, list{math.NaN(), list{}}), "events no list": pack(t, list{1.5, 3}),
		"negative rank": pack(t, list{1.5, list{}, -1}),
		"rank 2^31":     pack(t, list{1.5, list{}, 1 << 31}), "rank text": pack(t, list{1.5, list{}, "0"}),
		"trailing bytes":     append(slices.Clone(whole), 0),
		"removal unreadable": pack(t, list{1.5, list{list{"BlockRemoved", list{"x"}}}, 0}),
		"removal no hashes":  pack(t, list{1.5, list{list{"BlockRemoved"}}, 0}),
		"removal bad group":  pack(t, list{1.5, list{list{"BlockRemoved", list{1}, "GPU", -3}}, 0}),
		"2^31 events": append([]byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd, 0x80, 0, 0, 0},
			make([]byte, 100)...),
		"2^31 hashes": append(append(append([]byte{0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x95, 0xab},
			"BlockStored"...),
			0xdd, 0x80, 0, 0, 0), make([]byte, 100)...),
		"2^32-1 text":  {0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x91, 0xdb, 0xff, 0xff, 0xff, 0xff, 'x'},
		"deep nesting": append([]byte{0x92, 0x01, 0x91}, bytes.Repeat([]byte{0x91}, 1000)...),
		"never used":   {0x92, 0x01, 0x91, 0xc1},
	}
	for i := range whole {
		cases[fmt.Sprintf("cut at %d", i)] = whole[:i]
	}
	for name, payload := range cases {
		t.Run(name, func(t *testing.T) {
			var d batchDecoder
			_, err := d.Decode(payload)
			require.ErrorIs(t, err, errMalformed)
			var got record
			d.Deliver(&got, nil)
			assert.Empty(t, got)
		})
	}
}

func TestCountsAreLimited(t *testing.T) {
	var d batchDecoder
	events := make(list, maxEvents+1)
	for i := range events {
		events[i] = 0
	}
	_, err := d.Decode(pack(t, list{1.5, events}))
	require.ErrorIs(t, err, errMalformed)
	_, err = d.Decode(make([]byte, maxBatchBytes+1))
	require.ErrorIs(t, err, errMalformed)
}

func TestSalt(t *testing.T) {
	salted := func(parent any, lora any, extra ...any) *Stored {
		var d batchDecoder
		_, err := d.Decode(pack(t, list{1.5, list{stored(list{5, 6}, parent, 4, nil, "GPU", lora, extra)}}))
		require.NoError(t, err)
		require.Len(t, d.events, 1)
		d.fill(&d.events[0])
		return &d.stored
	}
	check := func(ev *Stored, want string, wantOK bool) {
		t.Helper()
		salt, ok := ev.Salt()
		assert.Equal(t, want, salt)
		assert.Equal(t, wantOK, ok)
	}
	check(salted(nil, nil, nil, nil), "", true)
	check(salted(nil, nil, list{"tenant"}, nil), "tenant", true)
	check(salted(nil, "adapter", list{"adapter", "tenant"}, list{"adapter"}), "tenant", true)
	check(salted(7, "adapter", list{"adapter"}, list{"adapter"}), "", true)
	for _, ev := range []*Stored{
		salted(nil, nil, nil, list{"tenant"}), salted(7, nil, list{"tenant"}, nil),
		salted(nil, "adapter", list{"other"}, nil),
		salted(nil, nil, list{list{"image", 3}}, nil), salted(nil, nil, list{"a", "b"}, nil),
		salted(nil, nil, 3, nil),
	} {
		_, ok := ev.Salt()
		assert.False(t, ok)
	}
}

func TestGroupsThatCannotBeIndexed(t *testing.T) {
	event := func(group int, spec string) list {
		return stored(list{1}, nil, 2, nil, "GPU", nil, list{nil}, group, spec)
	}
	var d batchDecoder
	var groups groupFilter
	var got record
	window := event(1, "sliding_window")
	window[3] = list{1, 2, 3, 4, 5, 6} // a span whose inner hashes are left out
	for _, batch := range []list{
		{event(0, "full_attention"), window},
		{list{"BlockRemoved", list{1}, "GPU", 1}, list{"BlockRemoved", list{1}, "GPU", 0}},
	} {
		b, err := d.Decode(pack(t, list{1.5, batch}))
		require.NoError(t, err)
		assert.Zero(t, b.Malformed)
		d.Deliver(&got, &groups)
	}
	assert.Len(t, got, 2)
	assert.Contains(t, got[1], "group=0")
	assert.Equal(t, uint64(2), groups.Skipped)
}

// RP31: The salt of an event stands in a member of a map, in a map of metadata, or in a map behind the
// seventh element of an array. Members that may set blocks apart and are not known are counted.
func TestSaltAsSGLangWritesIt(t *testing.T) {
	event := func(more dict) dict {
		ev := dict{
			"type": "BlockStored", "block_hashes": list{5}, "parent_block_hash": nil,
			"token_ids": list{1, 2}, "block_size": 2, "lora_id": nil, "medium": "GPU",
		}
		maps.Copy(ev, more)
		return ev
	}
	salted := dict{"cache_salt": "tenant"}
	for name, tc := range map[string]struct {
		event   any
		salt    string
		unknown int
	}{
		"array":         {stored(list{5}, nil, 2, nil, "GPU", salted), "tenant", 0},
		"map":           {event(salted), "tenant", 0},
		"nested map":    {event(dict{"metadata": salted}), "tenant", 0},
		"session":       {event(dict{"session_id": "s", "metadata": dict{"session_id": "s"}}), "", 0},
		"without":       {event(dict{"cache_salt": nil, "metadata": nil, "colour": nil}), "", 0},
		"unknown":       {event(dict{"cache_salt": "tenant", "image_hash": "i"}), "tenant", 1},
		"in metadata":   {event(dict{"metadata": dict{"image_hash": 7}}), "", 1},
		"behind arrays": {append(stored(list{5}, nil, 2), make(list, 9)...), "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			var d batchDecoder
			batch, err := d.Decode(pack(t, list{1.5, list{tc.event}}))
			require.NoError(t, err)
			assert.Equal(t, batchInfo{TS: 1.5, Rank: -1, Events: 1, UnknownMembers: tc.unknown}, batch)
			d.fill(&d.events[0])
			salt, ok := d.stored.Salt()
			assert.Equal(t, [...]any{tc.salt, true}, [...]any{salt, ok})
		})
	}
}

// llm-d-inference-sim writes 0 where a chain begins, vLLM and SGLang nil.
func TestParentOfARoot(t *testing.T) {
	for _, root := range []any{nil, 0, uint64(0)} {
		_, got := decodeAll(t, pack(t, list{1.5, list{stored(list{5}, root, 2)}}))
		require.Len(t, got, 1)
		assert.Contains(t, got[0], "parent=none")
	}
}

// The SGLang page hash, as its engines publish it: signed integers.
func TestSGLangChain(t *testing.T) {
	_, got := decodeAll(t, pack(t, list{1.5, list{
		list{
			"BlockStored",
			list{int64(-3488128144981237669), int64(-3787494577174227566)},
			nil,
			list{1, 2, 3, 4, 5, 6, 7, 8},
			4, nil,
		},
	}}))
	assert.Equal(t, record{"S [-3488128144981237669 -3787494577174227566] parent=none tokens=[1 2 3 4 5 6 " +
		"7 8] bs=4 medium= lora=/-1 group=0 kind= extra=[]"}, got)
}

// FuzzDecodeBatch: nothing panics, nothing is trusted, and what is accepted is msgpack that an independent
// decoder accepts too.
func FuzzDecodeBatch(f *testing.F) {
	for _, g := range goldens {
		b, _ := hex.DecodeString(g)
		f.Add(b)
	}
	f.Add(pack(f, list{
		1.5,
		list{stored(list{5}, 5, 2), list{"AllBlocksCleared"}, dict{"type": "X"}},
		nil,
		"tail",
	}))
	var d batchDecoder
	f.Fuzz(func(t *testing.T, payload []byte) {
		b, err := d.Decode(payload)
		var got record
		d.Deliver(&got, nil)
		if err != nil {
			assert.Empty(t, got)
			return
		}
		assert.LessOrEqual(t, len(got), b.Events)
		assert.LessOrEqual(t, cap(d.hashes), 2*len(payload)+1024, "memory is bounded by the input")
		var again batchDecoder
		b2, err := again.Decode(payload)
		require.NoError(t, err)
		assert.Equal(t, b, b2, "no state is carried over")
		dec := msgpack.NewDecoder(bytes.NewReader(payload))
		assert.NoError(t, dec.Skip())
	})
}

func BenchmarkDecode(b *testing.B) {
	for _, blocks := range []int{1, 128} {
		hashes := list{}
		for i := range blocks {
			hashes = append(hashes, uint64(1)<<63+uint64(i))
		}
		ids := list{}
		for i := range blocks * 16 {
			ids = append(ids, i%50000)
		}
		payload := pack(b, list{1.5, list{dict{
			"type": "BlockStored", "block_hashes": hashes,
			"parent_block_hash": nil, "token_ids": ids, "block_size": 16, "medium": "GPU", "group_idx": 0,
			"kv_cache_spec_kind": "full_attention",
		}}, 0})
		b.Run(fmt.Sprintf("blocks=%d", blocks), func(b *testing.B) {
			var d batchDecoder
			var sink discard
			b.ReportAllocs()
			for b.Loop() {
				if _, err := d.Decode(payload); err != nil {
					b.Fatal(err)
				}
				d.Deliver(sink, nil)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*blocks), "ns/block")
		})
	}
}

type discard struct{}

func (discard) Stored(*Stored)   {}
func (discard) Removed(*Removed) {}
func (discard) Cleared()         {}
func (discard) Reset(bool)       {}

func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }
