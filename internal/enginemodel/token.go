package enginemodel

import (
	"encoding/binary"
	"unicode/utf8"
)

// BytesPerToken is how much text one token holds at most.
const BytesPerToken = 4

// Marker tokens stand for what has no text. No UTF-8 text holds a byte 0xFF, so no text token can collide
// with them.
const (
	MarkerSystem    uint32 = 0xFFFFFF00
	MarkerUser      uint32 = 0xFFFFFF01
	MarkerAssistant uint32 = 0xFFFFFF02
	MarkerTool      uint32 = 0xFFFFFF03
	MarkerDeveloper uint32 = 0xFFFFFF04
	MarkerOther     uint32 = 0xFFFFFF05
	MarkerEnd       uint32 = 0xFFFFFF10 // end of a chat message, and the end-of-sequence token of an answer
	MarkerNUL       uint32 = 0xFFFFFF11 // one NUL byte: as part of a text token its zero would be lost
	firstMarker     uint32 = 0xFFFFFF00
)

// AppendTokens appends the tokens of text to dst. A token is the next up to BytesPerToken bytes, its id these
// bytes as a little-endian number. It is reversible, and prefix-stable but for the last token: appending to a
// text changes no earlier token.
func AppendTokens(dst []uint32, text string) []uint32 {
	for len(text) > 0 {
		n, id := cut(text)
		dst = append(dst, id)
		text = text[n:]
	}
	return dst
}

func cut(text string) (n int, id uint32) {
	if text[0] == 0 {
		return 1, MarkerNUL
	}
	for n < len(text) && n < BytesPerToken && text[n] != 0 {
		id |= uint32(text[n]) << (8 * n)
		n++
	}
	return n, id
}

// AppendText appends the bytes of a token to dst: nothing for a marker, and perhaps only a part of a
// character.
func AppendText(dst []byte, id uint32) []byte {
	if id == MarkerNUL {
		return append(dst, 0)
	}
	if id >= firstMarker {
		return dst
	}
	for ; id != 0; id >>= 8 {
		dst = append(dst, byte(id))
	}
	return dst
}

// Text is the text of tokens; bytes that form no character become U+FFFD.
func Text(tokens []uint32) string {
	var raw []byte
	for _, id := range tokens {
		raw = AppendText(raw, id)
	}
	return ValidText(raw)
}

// ValidText is raw as text, each run of bytes that form no character as one U+FFFD.
func ValidText(raw []byte) string {
	if utf8.Valid(raw) {
		return string(raw)
	}
	return string([]rune(string(raw)))
}

// Message is one chat message as the template sees it.
type Message struct {
	Role    string
	Content string
}

// AppendChat appends the chat template of messages to dst: per message role marker, content, end; then, if
// generate is set, the assistant's marker, behind which the answer begins. The next turn's prompt thus begins
// with this turn's tokens.
func AppendChat(dst []uint32, messages []Message, generate bool) []uint32 {
	for _, m := range messages {
		dst = append(dst, roleMarker(m.Role))
		dst = AppendTokens(dst, m.Content)
		dst = append(dst, MarkerEnd)
	}
	if generate {
		dst = append(dst, MarkerAssistant)
	}
	return dst
}

func roleMarker(role string) uint32 {
	switch role {
	case "system":
		return MarkerSystem
	case "user":
		return MarkerUser
	case "assistant":
		return MarkerAssistant
	case "tool":
		return MarkerTool
	case "developer":
		return MarkerDeveloper
	default:
		return MarkerOther
	}
}

// appendIDs appends tokens as little-endian bytes: the form that is hashed.
func appendIDs(dst []byte, tokens []uint32) []byte {
	for _, id := range tokens {
		dst = binary.LittleEndian.AppendUint32(dst, id)
	}
	return dst
}
