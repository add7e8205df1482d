package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMembersGivesPositions(t *testing.T) {
	const body = ` { "a" : [1, {"x":{"y":2}}] ,"\u0062":"c"} `
	var got []string
	require.NoError(t, Members([]byte(body), func(key []byte, m, v Span) error {
		got = append(got, string(key), body[m.Start:m.End], body[v.Start:v.End])
		return nil
	}))
	assert.Equal(t, []string{
		"a", `"a" : [1, {"x":{"y":2}}]`, `[1, {"x":{"y":2}}]`, "b", `"\u0062":"c"`, `"c"`,
	}, got)
	stop := errors.New("stop")
	require.ErrorIs(t, Members([]byte(body), func([]byte, Span, Span) error { return stop }), stop)
	for _, bad := range []string{``, ` `, `[]`, `1`, `{`, `{"a":1}x`, `{"a":01}`, `{"a":1,}`, `{"a"}`} {
		var fault *BodyError
		err := Members([]byte(bad), func([]byte, Span, Span) error { return nil })
		require.ErrorAs(t, err, &fault, bad)
	}
}

func TestElementsAndPrompts(t *testing.T) {
	for list, want := range map[string][]string{
		`[]`: nil, `[ ]`: nil, `[1, "a,b" ,[2,3],{}]`: {`1`, `"a,b"`, `[2,3]`, `{}`},
	} {
		var got []string
		Elements([]byte(list), func(e Span) bool {
			got = append(got, list[e.Start:e.End])
			return true
		})
		assert.Equal(t, want, got, list)
	}
	for value, want := range map[string]int{
		`"a"`: 1, `null`: 1, `[]`: 1, `[1,2,3]`: 1, `["a"]`: 1, `["a","b"]`: 2, `[[1],[2],[3]]`: 3,
		`["a",1]`: 1,
	} {
		assert.Equal(t, want, Prompts([]byte(value)), value)
	}
}

// FuzzMembersCutEachWay: what Members accepts is JSON, and a copy without some members and with two more has
// exactly the others and these.
func FuzzMembersCutEachWay(f *testing.F) {
	for _, body := range []string{
		`{}`, `{ }`, `{"a":1}`, ` {"a":1 , "b":[{"a":2}],"c":null } `, `{"\u0061":"\ud800","a":1}`,
		`{"a":1}}`,
	} {
		f.Add(body, uint8(5))
	}
	f.Fuzz(func(t *testing.T, text string, which uint8) {
		body := []byte(text)
		var cuts Cuts
		cuts.Reset()
		n, kept := 0, map[string]string{}
		err := Members(body, func(key []byte, m, v Span) error {
			isCut := which>>(n%8)&1 == 1
			cuts.Member(m, isCut)
			if n++; !isCut {
				kept[string(key)] = text[v.Start:v.End]
			}
			return nil
		})
		if err != nil {
			return
		}
		cuts.Close()
		require.True(t, json.Valid(body))
		got := AppendEdited([]byte("{x"), body, cuts.Spans, nil, []byte(`"new member":1`), []byte(`"z":2`))
		require.True(t, bytes.HasPrefix(got, []byte("{x")))
		require.True(t, json.Valid(got[2:]), "%s", got)
		kept["new member"], kept["z"] = "1", "2"
		after := map[string]string{}
		require.NoError(t, Members(got[2:], func(key []byte, _, v Span) error {
			after[string(key)] = string(got[2+v.Start : 2+v.End])
			return nil
		}))
		require.Equal(t, kept, after)
	})
}
