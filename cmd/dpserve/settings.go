package main

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/engineflags"
	"github.com/dpserve/dpserve/internal/problem"
)

// settings are the keys of an application that a command line sets, besides its model and its engines: by
// flags of dpserve, and by those of other routers.
type settings struct {
	list    []setting
	leftOut []string // flags that say nothing here, each with the reason
}

type setting struct {
	flag  string // as users write it
	key   string // of the application, such as routing.policy
	value any
	row   *engineflags.RouterFlag // nil: a flag of dpserve
}

// Keys of an application that command lines know.
const (
	keyPolicy   = "routing.policy"
	keyIdentity = "routing.identity"
	keyParams   = "routing.params."
)

// add adds the flags of dpserve.
func (s *settings) add(flags *pflag.FlagSet) {
	flags.Func("policy", "routing `policy`; default: mex, cohorts for a lockstep group",
		func(text string) error {
			s.put(setting{flag: "--policy", key: keyPolicy, value: text})
			return nil
		})
	flags.Func("param", "parameter of the routing policy, `NAME=VALUE`; repeatable", func(text string) error {
		name, value, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return problem.New(problem.InvalidArgument, "--param %q: wanted NAME=VALUE", text).
				WithHint("for example --param cache_threshold=0.3")
		}
		s.put(setting{flag: "--param " + name, key: keyParams + name, value: readParam(value)})
		return nil
	})
	flags.Func("identity", "what makes prompts equal for the policy: text, or `tokens` of the engines",
		func(text string) error {
			s.put(setting{flag: "--identity", key: keyIdentity, value: text})
			return nil
		})
}

// addRouterFlags adds the flags of other routers, without those that the command has under the same name.
// The flags of engines are the engines' on the command line of serve.
func (s *settings) addRouterFlags(flags *pflag.FlagSet, command string) {
	for _, row := range engineflags.RouterFlags() {
		isEngines := command == "serve" && engineflags.Find(engineflags.Sim, row.Name) != engineflags.Unknown
		if isEngines || flags.Lookup(row.Name) != nil {
			continue
		}
		add := flags.Func
		if row.Switch {
			add = flags.BoolFunc
		}
		add(row.Name, "a flag of "+row.Peer, func(text string) error { return s.read(flags, &row, text) })
		_ = flags.MarkHidden(row.Name) // it exists
	}
}

// read reads a flag of another router.
func (s *settings) read(flags *pflag.FlagSet, row *engineflags.RouterFlag, text string) error {
	flag := "--" + row.Name
	if row.Switch {
		on, err := strconv.ParseBool(text)
		switch {
		case err != nil:
			return problem.New(problem.InvalidArgument, "%s %q: wanted true or false", flag, text).
				WithHint("write %s alone, or leave it out", flag)
		case !on:
			return nil
		}
		text = row.Value
	}
	switch {
	case row.Instead != "":
		return problem.New(problem.InvalidArgument, "%s is a flag of %s that dpserve does not have", flag,
			row.Peer).WithHint("%s", row.Instead)
	case row.LeftOut != "":
		s.leftOut = append(s.leftOut, flag+" is left out: "+row.LeftOut)
		return nil
	case row.Key != "":
		value := any(true)
		if text != "" {
			value = readParam(text)
		}
		s.put(setting{flag: flag, key: row.Key, value: value, row: row})
		return nil
	case flags.Lookup(row.Flag) == nil:
		return problem.New(problem.InvalidArgument, "%s is not for this command", flag).
			WithHint("%s", otherWords[row.Flag])
	}
	if row.Value != "" {
		text = fmt.Sprintf(row.Value, text)
	}
	return flags.Set(row.Flag, text)
}

// put sets a key. The last of several flags for it counts.
func (s *settings) put(one setting) {
	if name, isText := one.value.(string); isText && strings.HasSuffix(one.key, keyPolicy) {
		one.value = engineflags.PolicyName(name)
	}
	s.list = slices.DeleteFunc(s.list, func(was setting) bool { return was.key == one.key })
	s.list = append(s.list, one)
}

// find returns the setting of a key, nil if no flag sets it.
func (s *settings) find(key string) *setting {
	i := slices.IndexFunc(s.list, func(one setting) bool { return one.key == key })
	if i < 0 {
		return nil
	}
	return &s.list[i]
}

// first returns a key that the command line sets, with its flag; "" if there is none.
func (s *settings) first() (key, flag string) {
	if len(s.list) == 0 {
		return "", ""
	}
	return s.list[0].key, s.list[0].flag
}

// apply writes the settings into an application, and says which flags are left out.
func (s *settings) apply(e *env, doc object) {
	for _, text := range s.leftOut {
		printMessage(e.io.Err, "%s", text)
	}
	s.settleRouting()
	for _, one := range s.list {
		at, keys := doc, strings.Split(one.key, ".")
		last := len(keys) - 1
		for _, key := range keys[:last] {
			inner, isMap := at[key].(object)
			if !isMap {
				inner = object{}
				at[key] = inner
			}
			at = inner
		}
		at[keys[last]] = one.value
	}
}

// appendTo writes the settings into an application at the end of a file.
func (s *settings) appendTo(e *env, text []byte) []byte {
	keys := object{}
	s.apply(e, keys)
	return appendYAML(text, 4, keys)
}

// parse reads a file with the settings.
func (s *settings) parse(e *env, base app.Application, name string, text []byte) (*appFile, error) {
	file, err := parseApps(e, base, name, text)
	if faults, ok := errors.AsType[app.Faults](err); ok && len(s.list) > 0 {
		return nil, s.explain("up", faults, s.wordOf)
	}
	return file, err
}

// settleRouting adds what flags of other routers mean beyond their own key: a parameter means the policy of
// its router if the command line names none, and Dynamo's kv compares prompts by tokens.
func (s *settings) settleRouting() {
	for _, one := range slices.Clone(s.list) {
		if one.row != nil && strings.HasPrefix(one.key, keyParams) && s.find(keyPolicy) == nil {
			s.put(setting{flag: one.flag, key: keyPolicy, value: one.row.Policy(), row: one.row})
		}
	}
	policy := s.find(keyPolicy)
	if policy != nil && policy.value == "kv" && policy.row != nil && policy.row.Peer == engineflags.Dynamo &&
		s.find(keyIdentity) == nil {
		s.put(setting{flag: policy.flag, key: keyIdentity, value: "tokens"})
	}
}

// wordOf returns the flags that set a key of the application or keys below it, else the key.
func (s *settings) wordOf(path string) string {
	path = strings.TrimPrefix(path, "applications[0].")
	var flags []string
	for _, one := range s.list {
		if one.key == path || strings.HasPrefix(one.key, path+".") {
			flags = append(flags, one.flag)
		}
	}
	if len(flags) == 0 {
		return path
	}
	return strings.Join(flags, ", ")
}

// explain says the faults of an application in the words of the command line. A parameter that the policy
// does not have may be one of the policy of another router.
func (s *settings) explain(command string, faults app.Faults, wordOf func(path string) string) error {
	for i := range faults {
		if !strings.HasSuffix(faults[i].Path, "routing.params") {
			continue
		}
		for _, one := range s.list {
			if one.row != nil && strings.HasPrefix(one.key, keyParams) &&
				s.find(keyPolicy).value != one.row.Policy() {
				faults[i].Hint = fmt.Sprintf("%s is for --policy %s", one.flag, one.row.Policy())
			}
		}
	}
	return explainFaults(command, faults, wordOf)
}

// readParam reads the value of a parameter: a number, true, false, or a text.
func readParam(text string) any {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n
	}
	if x, err := strconv.ParseFloat(text, 64); err == nil && !math.IsNaN(x) && !math.IsInf(x, 0) {
		return x
	}
	switch text {
	case "true", "false":
		return text == "true"
	}
	return text
}

// appendYAML appends maps and their values to a file, in the order of their keys.
func appendYAML(text []byte, indent int, keys object) []byte {
	b := bytes.NewBuffer(slices.Clone(text))
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		fmt.Fprintf(b, "%*s%s:", indent, "", key)
		switch value := keys[key].(type) {
		case object:
			b.WriteByte('\n')
			b = bytes.NewBuffer(appendYAML(b.Bytes(), indent+2, value))
		case string:
			fmt.Fprintf(b, " %s\n", quoteString(value))
		default:
			fmt.Fprintf(b, " %v\n", value)
		}
	}
	return b.Bytes()
}
