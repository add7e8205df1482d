package openai

import (
	"bytes"
	"slices"

	"github.com/zeebo/xxh3"
)

// Rest watches the members of a body that is passed on as it comes. It knows the structure of JSON and no
// more: what is no JSON, the engine refuses. The zero value is at the beginning of the body.
type Rest struct {
	depth     int
	inString  bool
	isEscaped bool // the next byte of the string is part of an escape
	isKey     bool // the string is the name of a member of the body
	wantsKey  bool // the next string is one
	isHead    bool
	key       []byte   // as written
	seen      []uint64 // hashes of the names so far
}

// maxWatchedKey is the longest name of a member behind the messages, in bytes.
const maxWatchedKey = 256

// Begin reads the head of the body, which ScanHead has accepted.
func (w *Rest) Begin(head []byte) {
	w.isHead = true
	_ = w.Watch(head) // names in the head are good
	w.isHead = false
}

// Watch reads the next bytes. The error is a *BodyError: they must not be passed on.
func (w *Rest) Watch(b []byte) error {
	for i := 0; i < len(b); i++ {
		if w.inString {
			if i = w.text(b, i); i >= len(b) {
				return nil
			}
			if w.inString = false; w.isKey {
				w.isKey = false
				if err := w.note(); err != nil {
					return err
				}
			}
			continue
		}
		switch b[i] {
		case '"':
			w.inString, w.isKey, w.key = true, w.wantsKey, w.key[:0]
			w.wantsKey = false
		case '{', '[':
			w.depth++
			w.wantsKey = w.depth == 1
		case '}', ']':
			w.depth--
		case ',':
			w.wantsKey = w.depth == 1
		}
	}
	return nil
}

// text reads on in a string, and returns where its closing quote is; len(b): not here.
func (w *Rest) text(b []byte, i int) int {
	from := i
	for ; i < len(b); i++ {
		if w.isEscaped {
			w.isEscaped = false
			continue
		}
		if i = plain(b, i); i >= len(b) || b[i] == '"' {
			break
		}
		w.isEscaped = b[i] == '\\'
	}
	if w.isKey {
		w.key = append(w.key, b[from:min(i, len(b), from+max(maxWatchedKey+1-len(w.key), 0))]...)
	}
	return i
}

// note checks the name of a member.
func (w *Rest) note() error {
	key, hash := w.key, xxh3.Hash(w.key)
	switch isEscaped := bytes.IndexByte(key, '\\') >= 0; {
	case w.isHead && isEscaped && len(key) <= maxWatchedKey:
		hash = xxh3.Hash(Unescape(nil, key))
	case w.isHead:
	case isEscaped, len(key) > maxWatchedKey, len(w.seen) >= maxFields,
		slices.Contains(w.seen, hash), isBefore(key), Reserved(key):
		return newBodyError(key, "field %q comes too late in a body that is passed on as it comes: send it "+
			"before messages, once", key[:min(len(key), maxParam)])
	}
	w.seen = append(w.seen, hash)
	return nil
}

// isBefore reports whether a member must come before the messages, because dpserve needs or checks its value.
func isBefore(key []byte) bool {
	switch string(key) {
	case "model", "stream", "n", "vllm_xargs":
		return true
	}
	return false
}
