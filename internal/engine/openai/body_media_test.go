package openai

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestScanTellsTextFromMedia(t *testing.T) {
	for _, c := range []struct {
		content, media string // media is what is no text of it
		parts          int
	}{
		{`"hello"`, ``, 0},
		{`[{"type":"text","text":"look at image_url"}]`, ``, 0},
		{`[{"type":"image_url","image_url":{"url":"data:x"}}]`, `{"url":"data:x"}`, 1},
		{`[{"image_url":"http://a/b.png"},{"type":"text","text":"x"}]`, `"http://a/b.png"`, 1},
		{
			`[{"type":"input_audio", "input_audio" : {"data":"QUJD","format":"wav"}}]`,
			`{"data":"QUJD","format":"wav"}`, 1,
		},
		{
			`[{"type":"video_url","video_url":{"url":"v"}},{"type":"audio_url","audio_url":{"url":"a"}}]`,
			`{"url":"v"}{"url":"a"}`, 2,
		},
		{`[{"type":"image_embeds","image_embeds":"QUJD"}]`, `"QUJD"`, 1},
		{`[{"type":"text","text":"x","image_url":null}]`, ``, 0},
		{`[{"type":"image_url","image\u005furl":"counts as text"}]`, ``, 0},
		{`[{"type":"tool","x":{"image_url":"deeper down"}}]`, ``, 0},
	} {
		messages := `[{"role":"user","content":` + c.content + `}]`
		b := scan(t, Chat, `{"image_url":"not here","messages":`+messages+`,"metadata":[{"a":[{"image_u`+
			`rl":"x"}]}]}`)
		assert.Equal(t, c.parts, b.MediaParts, c.content)
		assert.Equal(t, len(messages), b.PromptBytes, c.content)
		assert.Equal(t, len(messages)-len(c.media), b.TextBytes, c.content)
	}
}

func TestScanCountsToolsAsText(t *testing.T) {
	const messages, tools = `[{"role":"user","content":"hi"}]`,
		`[{"type":"function","function":{"name":"f"}}]`
	for _, body := range []string{`{"tools":` + tools + `,"messages":` + messages + `}`, `{"messages":` +
		messages + `, "tools": ` + tools + `}`} {
		b := scan(t, Chat, body)
		assert.Equal(t, len(messages), b.PromptBytes)
		assert.Equal(t, len(messages)+len(tools), b.TextBytes)
	}
	assert.Equal(t, 4, scan(t, Completions, `{"prompt":"hi","tools":`+tools+`}`).TextBytes)
	assert.Equal(t, len(messages), scan(t, Chat, `{"messages":`+messages+`,"tools":null}`).TextBytes)
}

func TestMediaPartsAreBounded(t *testing.T) {
	b := scan(t, Chat, `{"messages":[{"content":[`+strings.Repeat(`{"image_url":1},`, 5000)+`1]}]}`)
	assert.Equal(t, maxMediaParts, b.MediaParts)
}

// RP18: however large the media of a chat are, its text has the same bytes.
func TestTextBytesIgnoreMedia(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		chat := func(size int) (body []byte, parts int) {
			var messages []any
			for i := range rapid.IntRange(0, 4).Draw(t, "messages") {
				var content []any
				for j := range rapid.IntRange(0, 4).Draw(t, "parts") {
					if (i+j)%2 == 0 {
						content = append(content,
							map[string]any{"type": "image_url", "image_url": strings.Repeat("A", size)})
						parts++
					} else {
						content = append(content, map[string]any{"type": "text", "text": "tell \"me\" more"})
					}
				}
				messages = append(messages, map[string]any{"role": "user", "content": content})
			}
			body, err := json.Marshal(map[string]any{"messages": messages})
			require.NoError(t, err)
			return body, parts
		}
		body, parts := chat(rapid.IntRange(0, 9000).Draw(t, "size"))
		var b Body
		require.NoError(t, b.Scan(Chat, body))
		require.Equal(t, parts, b.MediaParts)
		bare := strings.ReplaceAll(string(body), "A", "")
		var c Body
		require.NoError(t, c.Scan(Chat, []byte(bare)))
		require.Equal(t, c.TextBytes, b.TextBytes)
	})
}
