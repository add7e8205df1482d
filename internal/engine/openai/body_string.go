package openai

import (
	"encoding/binary"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// Eight bytes at a time: each constant is one byte repeated.
const (
	ones    = 0x0101010101010101
	highs   = 0x8080808080808080
	slashes = ones * '\\'
	// exchanges quote and blank, and maps the control characters onto themselves
	flipped  = ones * ('"' ^ ' ')
	controls = ones * (' ' + 1) // once flipped, the quote and the control characters are below it
)

// block is how many bytes one test covers in a long run.
const block = 64

// marks sets the high bit of every byte of w that ends a plain run of a JSON string: quote, backslash and
// control characters. It may set the bit of a byte beyond ASCII too, and of a byte above a marked one,
// because of the borrow.
func marks(w uint64) uint64 { return ((w ^ flipped) - controls) | ((w ^ slashes) - ones) }

// exact is marks without the bytes beyond ASCII: the xored constants leave the high bits of w alone, so one
// &^w serves both tests. The lowest mark is exact; a higher one may be a borrow's, so only the lowest may be
// used.
func exact(w uint64) uint64 { return marks(w) &^ w }

// plain is the index of the first special byte of b from i on, len(b) if there is none. It tests the first
// words one by one, because most runs are short.
func plain(b []byte, i int) int {
	if i+16 > len(b) {
		return plainFar(b, i)
	}
	p := (*[16]byte)(b[i : i+16 : i+16])
	if m := exact(binary.LittleEndian.Uint64(p[0:8])) & highs; m != 0 {
		return i + bits.TrailingZeros64(m)/8
	}
	if m := exact(binary.LittleEndian.Uint64(p[8:16])) & highs; m != 0 {
		return i + 8 + bits.TrailingZeros64(m)/8
	}
	return plainFar(b, i+16)
}

// plainFar is plain for long runs and for the last bytes of b.
func plainFar(b []byte, i int) int {
	i = skipASCII(b, i)
	end := i + block
	i, found := plainWords(b, i, end)
	if !found && i == end { // text beyond ASCII has stopped skipASCII
		i, found = plainWords(b, skipText(b, i), len(b))
	}
	for !found && i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= ' ' {
		i++
	}
	return i
}

// plainWords tests the whole words of b[i:end] one by one. It returns the index of the first special byte, or
// of the first byte that it did not test.
func plainWords(b []byte, i, end int) (at int, found bool) {
	for last := min(end, len(b)) - 8; i <= last; i += 8 {
		if m := exact(binary.LittleEndian.Uint64(b[i:i+8:i+8])) & highs; m != 0 {
			return i + bits.TrailingZeros64(m)/8, true
		}
	}
	return i, false
}

// skipASCII skips plain ASCII in whole blocks. It stops at the half of a block that holds a special byte or a
// byte beyond ASCII, or where less than a block is left.
func skipASCII(b []byte, i int) int {
	le := binary.LittleEndian
	for ; i+block <= len(b); i += block {
		p := (*[block]byte)(b[i : i+block : i+block])
		low := marks(le.Uint64(p[0:8])) | marks(le.Uint64(p[8:16])) |
			marks(le.Uint64(p[16:24])) | marks(le.Uint64(p[24:32]))
		high := marks(le.Uint64(p[32:40])) | marks(le.Uint64(p[40:48])) |
			marks(le.Uint64(p[48:56])) | marks(le.Uint64(p[56:64]))
		if (low|high)&highs == 0 {
			continue
		}
		if low&highs == 0 {
			i += block / 2
		}
		return i
	}
	return i
}

// skipText skips plain text of any characters in whole blocks. It stops at a block that holds a special byte,
// or where less than a block is left.
func skipText(b []byte, i int) int {
	le := binary.LittleEndian
	for ; i+block <= len(b); i += block {
		p := (*[block]byte)(b[i : i+block : i+block])
		low := exact(le.Uint64(p[0:8])) | exact(le.Uint64(p[8:16])) |
			exact(le.Uint64(p[16:24])) | exact(le.Uint64(p[24:32]))
		high := exact(le.Uint64(p[32:40])) | exact(le.Uint64(p[40:48])) |
			exact(le.Uint64(p[48:56])) | exact(le.Uint64(p[56:64]))
		if (low|high)&highs != 0 {
			break
		}
	}
	return i
}

// str checks the string that begins at the quote b[i] and returns the index behind its closing quote, -1 on a
// fault. Afterwards s.escaped is true if the string holds a backslash.
func (s *scanner) str(i int) int {
	s.escaped = false
	for i = plain(s.b, i+1); i < len(s.b); i = plain(s.b, i) {
		switch s.b[i] {
		case '"':
			return i + 1
		case '\\':
			s.escaped = true
			if i = s.escape(i + 1); i < 0 {
				return -1
			}
		default:
			return s.fail(faultControl, i)
		}
	}
	return s.fail(faultCut, len(s.b))
}

// escape checks what follows a backslash at b[i-1].
func (s *scanner) escape(i int) int {
	if i >= len(s.b) {
		return s.fail(faultCut, i)
	}
	switch s.b[i] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return i + 1
	case 'u':
		return s.hex4(i + 1)
	}
	return s.fail(faultEscape, i)
}

func (s *scanner) hex4(i int) int {
	for end := i + 4; i < end; i++ {
		if i >= len(s.b) {
			return s.fail(faultCut, i)
		}
		if nibble(s.b[i]) < 0 {
			return s.fail(faultEscape, i)
		}
	}
	return i
}

func nibble(c byte) rune {
	switch {
	case '0' <= c && c <= '9':
		return rune(c - '0')
	case 'a' <= c && c <= 'f':
		return rune(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return rune(c-'A') + 10
	}
	return -1
}

// Unescape appends the unescaped src, the checked inside of a JSON string, to dst. A lone surrogate is
// encoded in three bytes as if it were a character, so that two different keys never become equal.
func Unescape(dst, src []byte) []byte {
	for i := 0; i < len(src); {
		if src[i] != '\\' {
			dst = append(dst, src[i])
			i++
			continue
		}
		if src[i+1] != 'u' {
			dst = append(dst, meaning(src[i+1]))
			i += 2
			continue
		}
		r := unit(src[i+2:])
		i += 6
		if utf16.IsSurrogate(r) && i+6 <= len(src) && src[i] == '\\' && src[i+1] == 'u' {
			if pair := utf16.DecodeRune(r, unit(src[i+2:])); pair != utf8.RuneError {
				r = pair
				i += 6
			}
		}
		dst = appendRune(dst, r)
	}
	return dst
}

// meaning is the character of a one-letter escape.
func meaning(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

// unit reads four checked hex digits.
func unit(h []byte) rune { return nibble(h[0])<<12 | nibble(h[1])<<8 | nibble(h[2])<<4 | nibble(h[3]) }

// appendRune is utf8.AppendRune that also writes surrogates.
func appendRune(dst []byte, r rune) []byte {
	if utf16.IsSurrogate(r) {
		return append(dst, 0xE0|byte(r>>12&0x0F), 0x80|byte(r>>6&0x3F), 0x80|byte(r&0x3F))
	}
	return utf8.AppendRune(dst, r)
}
