package openai

import "bytes"

// MaxEvent is how many bytes of an incomplete event a relay holds back. A longer event passes without
// inspection.
const MaxEvent = 64 << 10

// EventEnd is the length of the first whole server-sent event in b, its blank line included; -1 while the end
// is missing. Lines end in LF or CRLF. from is how many bytes of b an earlier call has searched in vain, 0 at
// first, so that a long event that arrives in pieces is not searched again from its start.
func EventEnd(b []byte, from int) int {
	i := max(from-2, 0) // "\n\r" may be the beginning of a blank line
	for {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return -1
		}
		i += j + 1
		if i < len(b) && b[i] == '\n' {
			return i + 1
		}
		if i+1 < len(b) && b[i] == '\r' && b[i+1] == '\n' {
			return i + 2
		}
	}
}

var dataField = []byte("data:")

// EventData is the value of the event's first data line, without its line end; nil if the event has none (a
// comment). Engines write one data line per event.
func EventData(event []byte) []byte {
	for len(event) > 0 {
		line := event
		if i := bytes.IndexByte(event, '\n'); i >= 0 {
			line, event = event[:i], event[i+1:]
		} else {
			event = nil
		}
		if !bytes.HasPrefix(line, dataField) {
			continue
		}
		line = line[len(dataField):]
		if len(line) > 0 && line[0] == ' ' {
			line = line[1:]
		}
		return bytes.TrimSuffix(line, []byte{'\r'})
	}
	return nil
}
