package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	em "github.com/dpserve/dpserve/internal/enginemodel"
)

// fields reads the members of a JSON body one by one, so that a fault names its member. It has the tolerance
// of vLLM: numbers and booleans in strings pass, and null counts as absent.
type fields struct {
	members map[string]json.RawMessage
	fault   *apiError // the first one
	params  *legParams
}

// refuse keeps the first fault of the body.
func (f *fields) refuse(name, why string) {
	if f.fault != nil {
		return
	}
	input := inputText(f.members[name])
	if why == msgRequired {
		input = fmt.Sprintf("<dict of %d items>", len(f.members))
	}
	f.fault = schemaError("body."+name, why, input)
}

// has reports that the member is there and not null.
func (f *fields) has(name string) bool {
	raw := f.members[name]
	return len(raw) > 0 && raw[0] != 'n'
}

// read decodes a member; it reports false where the member is absent or wrong.
func (f *fields) read(name string, into any) bool {
	if !f.has(name) {
		return false
	}
	err := error(nil)
	if u, ok := into.(json.Unmarshaler); ok {
		err = u.UnmarshalJSON(f.members[name])
	} else {
		err = json.Unmarshal(f.members[name], into)
	}
	if err != nil {
		f.refuse(name, err.Error())
	}
	return err == nil
}

// object reads the members of a member; the caller adopts their faults.
func (f *fields) object(name string) *fields {
	inner := &fields{}
	f.read(name, &inner.members)
	return inner
}

// adopt takes over the fault of a member's members.
func (f *fields) adopt(inner *fields) {
	if f.fault == nil {
		f.fault = inner.fault
	}
}

// transferParams reads the parameters.
func (f *fields) transferParams() *legParams {
	if f.params == nil {
		f.params = &legParams{}
		f.read("kv_transfer_params", &f.params.members)
	}
	return f.params
}

func (f *fields) num(name string) (int, bool) {
	var n integer
	ok := f.read(name, &n)
	return int(n), ok
}

// numOr is num with a value for members that are absent or wrong.
func (f *fields) numOr(name string, otherwise int) int {
	if n, ok := f.num(name); ok {
		return n
	}
	return otherwise
}

func (f *fields) float(name string) (float64, bool) {
	var x number
	ok := f.read(name, &x)
	return float64(x), ok
}

func (f *fields) flag(name string) bool {
	var b boolean
	f.read(name, &b)
	return bool(b)
}

func (f *fields) str(name string) string {
	var s string
	f.read(name, &s)
	return s
}

// texts is a string or a list of strings.
func (f *fields) texts(name string) []string {
	if raw := f.members[name]; len(raw) > 0 && raw[0] == '"' {
		return []string{f.str(name)}
	}
	var out []string
	f.read(name, &out)
	return out
}

func (f *fields) nums(name string) []integer {
	var out []integer
	f.read(name, &out)
	return out
}

type (
	integer int
	number  float64
	boolean bool
)

// scalarText is the text of a number, a boolean or a string; objects and lists keep their brackets and fail
// in the parser that follows.
func scalarText(raw []byte) string {
	return strings.TrimSpace(strings.Trim(string(raw), `"`))
}

// bodyError is a fault in the words of the imitated engine.
type bodyError string

func (e bodyError) Error() string { return string(e) }

// UnmarshalJSON takes whole numbers in any spelling.
func (n *integer) UnmarshalJSON(raw []byte) error {
	text := scalarText(raw)
	i, err := strconv.ParseInt(text, 10, strconv.IntSize)
	if err == nil {
		*n = integer(i)
		return nil
	}
	var x number
	if err := x.UnmarshalJSON(raw); err != nil {
		return bodyError(msgNotInteger)
	}
	if float64(x) != math.Trunc(float64(x)) || math.Abs(float64(x)) >= 1<<53 {
		return errors.New("want an integer, got " + text)
	}
	*n = integer(x)
	return nil
}

// UnmarshalJSON takes numbers, and booleans as 0 and 1.
func (x *number) UnmarshalJSON(raw []byte) error {
	switch string(raw) {
	case "true":
		*x = 1
		return nil
	case "false":
		return nil
	}
	v, err := strconv.ParseFloat(scalarText(raw), 64)
	*x = number(v)
	return err
}

// UnmarshalJSON takes the words for yes and no.
func (b *boolean) UnmarshalJSON(raw []byte) error {
	switch text := strings.ToLower(scalarText(raw)); text {
	case "1", "true", "t", "yes", "y", "on":
		*b = true
	case "0", "false", "f", "no", "n", "off":
	default:
		return errors.New("want a boolean, got " + text)
	}
	return nil
}

// prompts takes the four forms of a prompt: string, [string], [int], [[int]].
func (f *fields) prompts() []prompt {
	raw := f.members["prompt"]
	if !f.has("prompt") || string(raw) == `""` {
		return nil
	}
	list := []json.RawMessage{raw}
	if raw[0] == '[' {
		if inner := bytes.TrimSpace(raw[1:]); inner[0] == '"' || inner[0] == '[' || inner[0] == ']' {
			f.read("prompt", &list)
		}
	}
	var out []prompt
	for _, raw := range list {
		p, ok := f.prompt(raw)
		if !ok {
			return nil
		}
		out = append(out, p)
	}
	return out
}

// prompt is one text or one list of token ids, which may not be empty.
func (f *fields) prompt(raw json.RawMessage) (prompt, bool) {
	if raw[0] == '"' {
		text, err := unquote(raw)
		if err != nil || text == "" {
			f.refuse("prompt", "want a text that is not empty")
			return prompt{}, false
		}
		return prompt{ids: em.AppendTokens(nil, text)}, true
	}
	ids, ok := plainIDs(raw)
	if !ok && json.Unmarshal(raw, &ids) != nil || len(ids) == 0 {
		f.refuse("prompt", "want texts or lists of token ids")
		return prompt{}, false
	}
	out := prompt{ids: make([]uint32, len(ids)), fromIDs: true}
	for i, id := range ids {
		if !f.isToken("prompt", i, id) {
			return prompt{}, false
		}
		out.ids[i] = uint32(id)
	}
	return out, true
}

// plainIDs reads a list that holds nothing but digits, as nearly all do: json.Unmarshal takes many times as
// long. ok is false for every other list. raw is valid JSON.
func plainIDs(raw []byte) (ids []int64, ok bool) {
	ids = make([]int64, 0, bytes.Count(raw, []byte{','})+1)
	id, digits := int64(0), 0
	for _, c := range raw[1:] {
		switch {
		case '0' <= c && c <= '9' && digits < maxPlainDigits:
			id, digits = 10*id+int64(c-'0'), digits+1
		case (c == ',' || c == ']') && digits > 0:
			ids, id, digits = append(ids, id), 0, 0
		case c == ' ' && digits == 0:
		default:
			return nil, false
		}
	}
	return ids, true
}

// maxPlainDigits is how many digits an id has at most that plainIDs reads.
const maxPlainDigits = 15

// unquote decodes a string, or null. A text without escapes is taken as it is, because json.Unmarshal
// passes over a large text twice more.
func unquote(raw []byte) (text string, err error) {
	if raw[0] == '"' && bytes.IndexByte(raw, '\\') < 0 && utf8.Valid(raw) {
		return string(raw[1 : len(raw)-1]), nil
	}
	err = json.Unmarshal(raw, &text)
	return text, err
}

// isToken refuses element i of a list if it is an id outside the vocabulary.
func (f *fields) isToken(name string, i int, id int64) bool {
	switch {
	case id < 0:
		f.refuse(name+"."+strconv.Itoa(i), msgNegative)
	case id > maxTokenID && f.fault == nil:
		f.fault = badRequest("", "Token id %d is out of vocabulary", id)
	}
	return id >= 0 && id <= maxTokenID
}

// messages reads the conversation. The calls of an assistant stand in the prompt as the model wrote them.
func (f *fields) messages() []em.Message {
	var list []struct {
		Role    *string     `json:"role"`
		Content messageText `json:"content"`
		Calls   []struct {
			Function struct {
				Name      string      `json:"name"`
				Arguments messageText `json:"arguments"`
			} `json:"function"`
		} `json:"tool_calls"`
	}
	if !f.has("messages") {
		f.refuse("messages", msgRequired)
	}
	f.read("messages", &list)
	var out []em.Message
	for i, m := range list {
		if m.Role == nil {
			f.refuse("messages."+strconv.Itoa(i)+".role", msgRequired)
			return nil
		}
		text := []byte(m.Content)
		for _, c := range m.Calls {
			text, _ = appendCall(text, c.Function.Name, []byte(c.Function.Arguments))
		}
		out = append(out, em.Message{Role: *m.Role, Content: string(text)})
	}
	return out
}

// chatTokens is the prompt of a conversation, with the tools in front of it. A request can ask that the
// answer goes on with the last message.
func (f *fields) chatTokens(messages []em.Message) []uint32 {
	generate, isContinued := !f.has("add_generation_prompt") || f.flag("add_generation_prompt"),
		f.flag("continue_final_message")
	if generate && isContinued && f.fault == nil {
		f.fault = badRequest("", "Cannot set both `continue_final_message` and `add_generation_prompt` to "+
			"True.")
	}
	if f.has("tools") {
		var tools bytes.Buffer
		if err := json.Compact(&tools, f.members["tools"]); err == nil { // the body was JSON
			messages = append([]em.Message{{Role: "tools", Content: tools.String()}}, messages...)
		}
	}
	ids := em.AppendChat(nil, messages, generate)
	if isContinued && len(messages) > 0 && !generate {
		ids = ids[:len(ids)-1] // without the end of the last message
	}
	return ids
}

// messageText is the content of a message: a text, or text parts, which are joined. The engine reads no
// other media.
type messageText string

// UnmarshalJSON implements json.Unmarshaler.
func (t *messageText) UnmarshalJSON(raw []byte) error {
	if raw[0] != '[' {
		text, err := unquote(raw)
		*t = messageText(text)
		return err
	}
	var parts []struct {
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return err
	}
	texts := make([]string, len(parts))
	for i, part := range parts {
		if part.Text == nil {
			return errors.New("this model reads text parts only")
		}
		texts[i] = *part.Text
	}
	*t = messageText(strings.Join(texts, "\n"))
	return nil
}
