package openai

import (
	"bytes"
)

// reserved says whether a top-level field belongs to dpserve: it picks or feeds the rank. A client's is taken
// out.
func reserved(key []byte) bool {
	switch string(key) {
	case "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "kv_transfer_params":
		return true
	}
	return bytes.HasPrefix(key, []byte("bootstrap_"))
}

// run finds the bytes to cut so that what is left is an object again: a run of reserved members goes with the
// comma behind it; the last run, which has none, with the comma before it.
type run struct {
	first   int // start of the run, -1 outside one
	last    int // end of its last member
	kept    int // end of the last member that stays
	anyKept bool
}

// member notes the member at m and appends the cut that it closes, if any.
func (r *run) member(cuts []Span, m Span, cut bool) []Span {
	switch {
	case cut && r.first < 0:
		r.first, r.last = m.Start, m.End
	case cut:
		r.last = m.End
	default:
		if r.first >= 0 {
			cuts = append(cuts, Span{r.first, m.Start})
		}
		r.first, r.kept, r.anyKept = -1, m.End, true
	}
	return cuts
}

// close appends the cut of a run that reaches the end of the object.
func (r *run) close(cuts []Span) []Span {
	if r.first < 0 {
		return cuts
	}
	if r.anyKept {
		r.first = r.kept
	}
	return append(cuts, Span{r.first, r.last})
}

// Spliced is body, as last scanned, without the members in b.Strip and otherwise byte for byte. With nothing
// to strip it is body itself; else it is appended to dst, which must not overlap body.
func (b *Body) Spliced(dst, body []byte) []byte {
	if len(b.Strip) == 0 {
		return body
	}
	from := 0
	for _, cut := range b.Strip {
		dst = append(dst, body[from:cut.Start]...)
		from = cut.End
	}
	return append(dst, body[from:]...)
}

// AppendField appends body, an object that Scan accepted, to dst with one more member at its end. value is
// JSON; name must not be in the body (Scan refuses doubles, and reserved fields are stripped before they are
// set).
func AppendField(dst, body []byte, name string, value []byte) []byte {
	brace := bytes.LastIndexByte(body, '}')
	head := bytes.TrimRight(body[:brace], " \t\r\n")
	dst = append(dst, head...)
	if head[len(head)-1] != '{' {
		dst = append(dst, ',')
	}
	dst = appendString(dst, name)
	dst = append(dst, ':')
	dst = append(dst, value...)
	return append(dst, body[brace:]...)
}
