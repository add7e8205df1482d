package openai

import (
	"bytes"
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// RP54: the beginning is enough where the body is cut in its messages and has what dpserve needs before them.
// A cut anywhere else is not.
func TestScanHead(t *testing.T) {
	const before = `{"model":"m","n":2,"stream":true,"user":"u","messages":`
	const body = before + `[{"role":"user","content":"a\nb"}],"max_tokens":8,"b":[{"c":1}]}`
	messages := bytes.Index([]byte(body), []byte(`,"max_tokens"`))
	for cut := range len(body) + 1 {
		var b Body
		ok := b.ScanHead([]byte(body[:cut]), false)
		require.Equal(t, cut >= len(before) && cut < messages, ok, body[:cut])
		if ok {
			assert.Equal(t, "m u", string(b.Model)+" "+string(b.User))
			assert.True(t, b.Stream && b.IsHead && b.HasModel)
			assert.Equal(t, []int{2, 1, -1, 0}, []int{b.Choices, b.MediaParts, b.PromptTokens, b.TextBytes})
		}
	}
	for head, mayLackModel := range map[string]bool{
		`{"stream":true,"messages":[`:                                                   true,
		`{"model":null,"stream":true,"messages":[`:                                      true,
		`{"model":"m","stream":true,"messages":["a` + "\n":                              false,
		`{"model":"m","messages":[`:                                                     false,
		`{"model":"m","stream":true,"routed_dp_rank":0,"messages":[`:                    false,
		`{"model":"m","stream":true,"vllm_xargs":{"kv_transfer_params":1},"messages":[`: false,
		`{"model":"m","stream":1,"messages":[`:                                          false,
		`{"model":"m","model":"m","stream":true,"messages":[`:                           false,
	} {
		var b Body
		assert.False(t, b.ScanHead([]byte(head), false), head)
		assert.Equal(t, mayLackModel, b.ScanHead([]byte(head), true), head)
	}
}

// RP53: of any body and in pieces of any size, no member passes behind the head that only dpserve may set,
// that is there already, or that has to be before the messages; every other one does.
func FuzzRest(f *testing.F) {
	const head = `{"model":"m","stream":true,"messages":[`
	for _, rest := range []string{
		`]}`, `"a,{}[]\"b\\"],"max_tokens":1}`, `],"stream":false}`, `],"messages":[]}`, `],"bootstrap_x":1}`,
		`],"\u006e":2}`, `{"n":1,"model":"x"}],"x":{"n":1},"y":["n"],"z":"n"}`,
		`], "a" : 1 , "a" : 2 }`, `]}}{"n":1}`,
	} {
		f.Add([]byte(rest), uint8(3))
	}
	f.Fuzz(func(t *testing.T, rest []byte, piece uint8) {
		watch := func(piece int) (err error) {
			var w Rest
			w.Begin([]byte(head))
			for part := range slices.Chunk(rest, piece) {
				if err = w.Watch(part); err != nil {
					break
				}
			}
			return err
		}
		err := watch(int(piece) + 1)
		require.Equal(t, err, watch(len(rest)+1))
		whole := append([]byte(head), rest...)
		if !json.Valid(whole) {
			return
		}
		names, isGood := map[string]bool{}, true
		require.NoError(t, Members(whole, func(key []byte, member, _ Span) error {
			k := string(key)
			if member.Start >= len(head) {
				isEscaped := bytes.IndexByte(whole[member.Start+1:member.Start+1+len(key)], '\\') >= 0
				isGood = isGood && !names[k] && !isBefore(key) && !Reserved(key) && !isEscaped &&
					len(k) <= maxWatchedKey
			}
			names[k] = true
			return nil
		}))
		if len(names) < maxFields {
			require.Equal(t, isGood, err == nil, "%s", whole)
		}
	})
}
