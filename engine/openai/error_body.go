package openai

import "fmt"

// BodyError says why a request body is refused with 400, in words for its author. It never quotes the prompt.
type BodyError struct {
	Message string
	Param   string // top-level field, empty if none is to blame
	Code    string // always CodeInvalidRequest so far

	fault fault
}

func (e *BodyError) Error() string { return e.Message }

// fault is the closed list of reasons for a BodyError.
type fault uint8

const (
	faultNone fault = iota
	faultEmpty
	faultCut
	faultByte
	faultControl
	faultEscape
	faultNumber
	faultLiteral
	faultAfter
	faultNotFinite
	faultNotObject
	faultDepth
	faultKeys
	faultTopKeys
	faultDuplicate
	faultType
	faultTooLarge
	faultReserved
)

// syntax says whether the body is not JSON at all, rather than JSON that is refused.
func (f fault) syntax() bool { return f >= faultEmpty && f <= faultNotFinite }

// text is the message of a fault at byte at of the body.
func (f fault) text(at int) string {
	const not = "body is not valid JSON: "
	switch f {
	case faultEmpty:
		return "body is empty; send a JSON object"
	case faultCut:
		return fmt.Sprintf(not+"it ends at byte %d, in the middle of a value", at)
	case faultControl:
		return fmt.Sprintf(not+"raw control character in a string at byte %d; escape it", at)
	case faultEscape:
		return fmt.Sprintf(not+"unknown escape in a string at byte %d", at)
	case faultNumber:
		return fmt.Sprintf(not+"malformed number at byte %d", at)
	case faultLiteral:
		return fmt.Sprintf(not+"unknown word at byte %d; there are true, false and null", at)
	case faultAfter:
		return fmt.Sprintf(not+"something follows the object at byte %d", at)
	case faultNotFinite:
		return fmt.Sprintf(not+"NaN or Infinity at byte %d; send a finite number or leave the field out", at)
	case faultNotObject:
		return "body must be a JSON object"
	case faultDepth:
		return fmt.Sprintf("body is nested deeper than %d levels", MaxDepth)
	case faultKeys:
		return fmt.Sprintf("body has more than %d keys in all", MaxKeys)
	case faultTopKeys:
		return fmt.Sprintf("body has more than %d fields", MaxFields)
	default:
		return fmt.Sprintf(not+"unexpected character at byte %d", at)
	}
}

// maxParam is how much of a field's name an error repeats, in bytes.
const maxParam = 64

func newBodyError(f fault, param []byte, format string, args ...any) *BodyError {
	return &BodyError{Message: fmt.Sprintf(format, args...), Param: string(param[:min(len(param), maxParam)]),
		Code: CodeInvalidRequest, fault: f}
}
