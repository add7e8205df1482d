package openai

import "bytes"

const (
	// MediaTokens is what a media part of a message counts as in an estimate, however many bytes it has:
	// engines go by its pixels or its length, which its bytes do not tell. A picture of 896 × 896 pixels is
	// 1,024 tokens to Qwen2.5-VL (one per 28 × 28 pixels), any picture 576 to LLaVA-1.5 and 256 to Gemma 3.
	MediaTokens = 1024
	// maxMediaParts bounds what media add to an estimate: vLLM refuses more than 999 of a kind unless it is
	// told otherwise.
	maxMediaParts = 999
	// partDepth is how deep the members of a content part are: body, messages, message, content, part.
	partDepth = 5
)

// media are the media parts of the messages: how many, and the bytes of their values.
type media struct{ parts, bytes int }

// isMedia says whether a member of a content part holds something that is no text: image_url, video_url,
// audio_url, input_audio, image_embeds and the like. A key with escapes is none: then its value counts as
// text.
func isMedia(key []byte) bool {
	return bytes.HasSuffix(key, []byte("_url")) || bytes.HasSuffix(key, []byte("_embeds")) ||
		string(key) == "input_audio" || string(key) == "image_pil"
}
