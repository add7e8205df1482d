package sim

import (
	"math"
	"strconv"
	"strings"
)

// fields reads typed members of a body and collects what is wrong with them, in the words and with the
// tolerance of the imitated server: numbers in strings pass, a wrong type is a complaint, null is absent.
type fields struct {
	body   value
	faults []fieldError
}

func (f *fields) complain(kind, loc, msg string, v *value) {
	f.faults = append(f.faults, fieldError{kind: kind, loc: "body." + loc, msg: msg, input: describe(v)})
}

// describe shows a value in a complaint without repeating client data at length.
func describe(v *value) string {
	switch v.kind {
	case kindAbsent, kindNull:
		return "None"
	case kindBool:
		if v.flag {
			return "True"
		}
		return "False"
	case kindNumber, kindString:
		return v.text
	case kindArray:
		return "<list of " + strconv.Itoa(v.len()) + " items>"
	case kindObject:
		return "<dict of " + strconv.Itoa(v.len()) + " items>"
	}
	return ""
}

// num is an integer member; ok is false where it is absent or wrong.
func (f *fields) num(name string) (n int, ok bool) {
	v := f.body.get(name)
	if !v.present() {
		return 0, false
	}
	n, kind, msg := asInt(&v)
	if kind != "" {
		f.complain(kind, name, msg, &v)
	}
	return n, kind == ""
}

// asInt converts as pydantic does; kind and msg say what is wrong.
func asInt(v *value) (n int, kind, msg string) {
	const base = "Input should be a valid integer"
	switch v.kind {
	case kindBool:
		if v.flag {
			n = 1
		}
		return n, "", ""
	case kindNumber, kindString:
		text := strings.TrimSpace(v.text)
		if n, err := strconv.Atoi(text); err == nil {
			return n, "", ""
		}
		x, err := strconv.ParseFloat(text, 64)
		switch {
		case err != nil && v.kind == kindString:
			return 0, "int_parsing", base + ", unable to parse string as an integer"
		case x != math.Trunc(x) || math.IsInf(x, 0):
			return 0, "int_from_float", base + ", got a number with a fractional part"
		case math.Abs(x) < 1<<53:
			return int(x), "", ""
		}
		return 0, "int_parsing_size", "Unable to parse input string as an integer, exceeded maximum size"
	case kindAbsent, kindNull, kindArray, kindObject:
	}
	return 0, "int_type", base
}

func (f *fields) float(name string) (x float64, ok bool) {
	v := f.body.get(name)
	if !v.present() {
		return 0, false
	}
	switch v.kind {
	case kindNumber, kindString:
		x, err := strconv.ParseFloat(strings.TrimSpace(v.text), 64)
		if err == nil {
			return x, true
		}
		f.complain("float_parsing", name,
			"Input should be a valid number, unable to parse string as a number", &v)
	case kindBool:
		return map[bool]float64{true: 1}[v.flag], true
	case kindAbsent, kindNull, kindArray, kindObject:
		f.complain("float_type", name, "Input should be a valid number", &v)
	}
	return 0, false
}

func (f *fields) flag(name string) bool { return f.flagOf(f.body, name, name) }

func (f *fields) flagOf(body value, name, loc string) bool {
	v := body.get(name)
	if !v.present() {
		return false
	}
	switch v.kind {
	case kindBool:
		return v.flag
	case kindNumber, kindString:
		switch strings.ToLower(v.text) {
		case "1", "true", "t", "yes", "y", "on":
			return true
		case "0", "false", "f", "no", "n", "off":
			return false
		}
		f.complain("bool_parsing", loc, "Input should be a valid boolean, unable to interpret input", &v)
	case kindAbsent, kindNull, kindArray, kindObject:
		f.complain("bool_type", loc, "Input should be a valid boolean", &v)
	}
	return false
}

func (f *fields) str(name string) string {
	v := f.body.get(name)
	if v.present() && v.kind != kindString {
		f.complain("string_type", name, "Input should be a valid string", &v)
		return ""
	}
	return v.text
}

// texts is a string or a list of strings.
func (f *fields) texts(name string) []string {
	v := f.body.get(name)
	switch {
	case !v.present():
		return nil
	case v.kind == kindString:
		return []string{v.text}
	case v.kind != kindArray:
		f.complain("string_type", name, "Input should be a valid string", &v)
		f.complain("list_type", name, "Input should be a valid list", &v)
		return nil
	}
	var out []string
	for i := range v.len() {
		item := v.at(i)
		if item.kind != kindString {
			f.complain("string_type", name+"."+strconv.Itoa(i), "Input should be a valid string", &item)
			continue
		}
		out = append(out, item.text)
	}
	return out
}

// nums is a list of integers.
func (f *fields) nums(name string) []int {
	v := f.body.get(name)
	if !v.present() {
		return nil
	}
	if v.kind != kindArray {
		f.complain("list_type", name, "Input should be a valid list", &v)
		return nil
	}
	var out []int
	for i := range v.len() {
		item := v.at(i)
		n, kind, msg := asInt(&item)
		if kind != "" {
			f.complain(kind, name+"."+strconv.Itoa(i), msg, &item)
			continue
		}
		out = append(out, n)
	}
	return out
}

// missing complains about a required member.
func (f *fields) missing(loc string) {
	f.faults = append(f.faults, fieldError{
		kind: "missing", loc: "body." + loc, msg: "Field required",
		input: describe(&f.body),
	})
}

func (f *fields) err() *apiError {
	if len(f.faults) == 0 {
		return nil
	}
	if f.faults[0].kind == outOfVocabulary {
		return badRequest("", "Token id %s is out of vocabulary", f.faults[0].input)
	}
	return schemaError(f.faults)
}

// pyFloat spells a number as Python does.
func pyFloat(x float64) string {
	s := strconv.FormatFloat(x, 'g', -1, 64)
	if abs := math.Abs(x); abs < 1e16 && abs >= 1e-4 || x == 0 {
		s = strconv.FormatFloat(x, 'f', -1, 64)
	}
	if !strings.ContainsAny(s, ".e") {
		s += ".0"
	}
	return s
}
