package openai

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// benchBodies are the bodies whose cost is a goal: small, a 400 KB prompt, the same full of escapes, and
// token ids.
func benchBodies() map[string][]byte {
	body := func(prompt string) []byte {
		return fmt.Appendf(nil, `{"model":"tiny","messages":[{"role":"user","content":%s}],`+
			`"max_tokens":64,"temperature":0,"stream":true}`, prompt)
	}
	const size = 400 << 10
	ids := strings.TrimSuffix(strings.Repeat("15339,", size/6), ",")
	return map[string][]byte{
		"small":   body(`"hello world"`),
		"plain":   body(`"` + strings.Repeat("the quick brown fox ", size/20) + `"`),
		"escaped": body(`"` + strings.Repeat(`nine chars\n`, size/12) + `"`),
		"ids":     fmt.Appendf(nil, `{"model":"tiny","prompt":[%s]}`, ids),
	}
}

// BenchmarkScan prints the time beside encoding/json on the same bytes in the same run.
func BenchmarkScan(b *testing.B) {
	for name, body := range benchBodies() {
		b.Run(name, func(b *testing.B) {
			var got Body
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			n := 0
			begun := time.Now()
			for b.Loop() {
				if err := got.Scan(Chat, body); err != nil {
					b.Fatal(err)
				}
				n++
			}
			own := float64(time.Since(begun).Nanoseconds()) / float64(n)
			base := unmarshalNs(b, body)
			b.ReportMetric(base, "ns/encoding_json")
			b.ReportMetric(base/own, "x_faster")
		})
	}
}

// RC1: BenchmarkPlain prints how many times faster plain is than the loop over words that it has replaced, on
// the same bytes in the same run, the two in turn, by the best time of each. "prose" has lines of 20 to 140
// bytes.
func BenchmarkPlain(b *testing.B) {
	const size = 400 << 10
	texts := map[string][]byte{
		"ascii":      []byte(strings.Repeat("the quick brown fox ", size/20)),
		"prose":      prose(size),
		"escaped":    []byte(strings.Repeat(`nine chars\n`, size/12)),
		"non_ascii":  []byte(strings.Repeat("\u65e5\u672c\u8a9e\u306e\u6587", size/15)),
		"one_accent": []byte("caf\u00e9" + strings.Repeat("the quick brown fox ", size/20)),
	}
	for name, text := range texts {
		b.Run(name, func(b *testing.B) {
			own, words := time.Hour, time.Hour
			for b.Loop() {
				begun := time.Now()
				runs(text, plain)
				middle := time.Now()
				runs(text, plainByWords)
				own, words = min(own, middle.Sub(begun)), min(words, time.Since(middle))
			}
			b.ReportMetric(float64(own.Nanoseconds()), "ns/plain")
			b.ReportMetric(float64(words)/float64(own), "x_faster")
		})
	}
}

func prose(size int) []byte {
	r, text := rand.New(rand.NewPCG(1, 2)), make([]byte, 0, size+150)
	for len(text) < size {
		text = append(text, strings.Repeat("quick fox ", 14)[:20+r.IntN(120)]+`\n`...)
	}
	return text
}

// runs looks at all plain runs of b, as a scan of a string does.
func runs(b []byte, plain func([]byte, int) int) {
	for i := 0; i < len(b); i += 2 {
		i = plain(b, i)
	}
}

// plainByWords is the baseline of BenchmarkPlain: a test for each word, and one for each of the three kinds
// in it.
func plainByWords(b []byte, i int) int {
	const quotes, blanks = ones * '"', ones * ' '
	for ; i+8 <= len(b); i += 8 {
		w := binary.LittleEndian.Uint64(b[i : i+8 : i+8])
		q, s, c := (w^quotes)-ones, (w^slashes)-ones, w-blanks
		if m := (q | s | c) &^ w & highs; m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
	}
	return plainByBytes(b, i)
}

// unmarshalNs is what the standard library takes to read the same fields.
func unmarshalNs(b *testing.B, body []byte) float64 {
	const n = 20
	begun := time.Now()
	for range n {
		var v struct {
			Model     string          `json:"model"`
			Stream    bool            `json:"stream"`
			N         int             `json:"n"`
			MaxTokens int64           `json:"max_tokens"`
			Messages  json.RawMessage `json:"messages"`
			Prompt    json.RawMessage `json:"prompt"`
		}
		if err := json.Unmarshal(body, &v); err != nil {
			b.Fatal(err)
		}
	}
	return float64(time.Since(begun).Nanoseconds()) / n
}

func BenchmarkSplice(b *testing.B) {
	body := []byte(`{"model":"tiny","routed_dp_rank":3,"prompt":"hello","bootstrap_room":9}`)
	var got Body
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		if err := got.Scan(Completions, body); err != nil {
			b.Fatal(err)
		}
		dst = got.Spliced(dst[:0], body)
	}
}

func BenchmarkParseUsage(b *testing.B) {
	chunks := map[string][]byte{
		"without": []byte(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny",` +
			`"choices":[{"index":0,"text":"m","logprobs":null,"finish_reason":null}]}` + "\n\n"),
		"with": []byte(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny",` +
			`"choices":[],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3,` +
			`"prompt_tokens_details":{"cached_tokens":0}},"system_fingerprint":"x"}` + "\n\n"),
	}
	for name, chunk := range chunks {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				ParseUsage(chunk)
			}
		})
	}
}

// BenchmarkRefuse is the longest that a bad shape can occupy the gateway (goal: 10 ms, SP8): keys up to the
// limit.
func BenchmarkRefuse(b *testing.B) {
	million := strings.Repeat(`"kkkk":0,`, 1_000_000)
	fields := make([]byte, 0, 1<<20)
	for i := range maxFields + 1 {
		fields = fmt.Appendf(fields, `"k%d":0,`, i)
	}
	bodies := map[string][]byte{
		"nested_keys": []byte(`{"a":{` + million + `}}`),
		"fields":      []byte(`{` + string(fields) + `}`),
		"depth":       []byte(`{"a":` + strings.Repeat("[", 10_000)),
	}
	for name, body := range bodies {
		b.Run(name, func(b *testing.B) {
			var got Body
			for b.Loop() {
				if got.Scan(Chat, body) == nil {
					b.Fatal("accepted")
				}
			}
		})
	}
}
