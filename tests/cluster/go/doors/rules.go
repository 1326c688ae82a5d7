package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"sync"
	"time"
)

// Rule says which requests are answered badly and how. Patterns match whole strings; an empty one matches all.
type Rule struct {
	ID     int    `json:"id"`
	Door   string `json:"door"`
	Method string `json:"method"`
	Path   string `json:"path"`
	Query  string `json:"query"`
	Agent  string `json:"agent"`
	Skip   int    `json:"skip"`  // let so many pass first
	Times  int    `json:"times"` // then act on so many; 0: on all

	Delay   float64           `json:"delay"`   // seconds before anything else
	Hang    bool              `json:"hang"`    // no answer until the rule is taken away
	Status  int               `json:"status"`  // answer this
	Reason  string            `json:"reason"`  // the word that goes with it
	Message string            `json:"message"` // the sentence that goes with it
	Headers map[string]string `json:"headers"` // of the answer
	Cut     bool              `json:"cut"`     // no answer: the connection ends
	After   bool              `json:"after"`   // Status or Cut only once the target has done what was asked
	CutAt   int64             `json:"cut_at"`  // the answer's body ends after so many bytes (and the connection)
	Rate    int64             `json:"rate"`    // the answer's body comes at so many bytes a second
	Gone    bool              `json:"gone"`    // a watch gets an event ERROR 410 and ends
	Hits    int               `json:"hits"`    // how many requests it acted on
	Seen    int               `json:"seen"`    // how many it matched

	patterns [5]*regexp.Regexp
	removed  chan struct{}
}

func (rule *Rule) compile() error {
	for n, text := range []string{rule.Door, rule.Method, rule.Path, rule.Query, rule.Agent} {
		if text == "" {
			continue
		}
		pattern, err := regexp.Compile("^(?:" + text + ")$")
		if err != nil {
			return err
		}
		rule.patterns[n] = pattern
	}
	rule.removed = make(chan struct{})
	return nil
}

func (rule *Rule) matches(words [5]string) bool {
	for n, pattern := range rule.patterns {
		if pattern != nil && !pattern.MatchString(words[n]) {
			return false
		}
	}
	return true
}

// Request is a line of the record of what went through.
type Request struct {
	N       int     `json:"n"`
	Time    float64 `json:"time"`
	Door    string  `json:"door"`
	Method  string  `json:"method"`
	Path    string  `json:"path"`
	Query   string  `json:"query"`
	Agent   string  `json:"agent"`
	Status  int     `json:"status"` // 0: none yet, or cut off before one
	Rule    int     `json:"rule"`   // the rule that acted on it; 0: none
	Seconds float64 `json:"seconds"`
	Open    bool    `json:"open"`

	cancel func()
}

const keptRequests = 500_000

// State is what all doors share.
type State struct {
	mutex    sync.Mutex
	rules    []*Rule
	nextRule int
	requests []*Request
	count    int
	open     map[*Request]struct{}
}

func newState() *State { return &State{open: map[*Request]struct{}{}, nextRule: 1} }

func (state *State) begin(door string, r *http.Request, cancel func()) *Request {
	state.mutex.Lock()
	defer state.mutex.Unlock()
	state.count++
	line := &Request{
		N: state.count, Time: float64(time.Now().UnixMicro()) / 1e6, Door: door, Method: r.Method,
		Path: r.URL.Path, Query: r.URL.RawQuery, Agent: r.UserAgent(), Open: true, cancel: cancel,
	}
	if len(state.requests) >= keptRequests {
		state.requests = append([]*Request{}, state.requests[keptRequests/2:]...)
	}
	state.requests = append(state.requests, line)
	state.open[line] = struct{}{}
	return line
}

func (state *State) end(line *Request) {
	state.mutex.Lock()
	defer state.mutex.Unlock()
	delete(state.open, line)
	line.Open = false
	line.Seconds = float64(time.Now().UnixMicro())/1e6 - line.Time
}

func (state *State) answered(line *Request, status int) {
	state.mutex.Lock()
	defer state.mutex.Unlock()
	line.Status = status
}

// choose finds the first rule for the request, and counts it.
func (state *State) choose(line *Request) *Rule {
	state.mutex.Lock()
	defer state.mutex.Unlock()
	words := [5]string{line.Door, line.Method, line.Path, line.Query, line.Agent}
	for _, rule := range state.rules {
		if !rule.matches(words) {
			continue
		}
		rule.Seen++
		if rule.Seen <= rule.Skip || (rule.Times > 0 && rule.Hits >= rule.Times) {
			continue
		}
		rule.Hits++
		line.Rule = rule.ID
		return rule
	}
	return nil
}

// control is the interface of the control socket: JSON in, JSON out.
func (state *State) control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /rules", func(w http.ResponseWriter, r *http.Request) {
		rule := &Rule{}
		decoder := json.NewDecoder(r.Body)
		decoder.DisallowUnknownFields()
		err := decoder.Decode(rule)
		if err == nil {
			err = rule.compile()
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		state.mutex.Lock()
		defer state.mutex.Unlock()
		rule.ID, rule.Hits, rule.Seen = state.nextRule, 0, 0
		state.nextRule++
		state.rules = append(state.rules, rule)
		reply(w, rule)
	})
	mux.HandleFunc("GET /rules", func(w http.ResponseWriter, _ *http.Request) {
		state.mutex.Lock()
		defer state.mutex.Unlock()
		reply(w, append([]*Rule{}, state.rules...))
	})
	mux.HandleFunc("DELETE /rules", func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.Atoi(r.URL.Query().Get("id"))
		all := r.URL.Query().Get("id") == ""
		if err != nil && !all {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		state.mutex.Lock()
		defer state.mutex.Unlock()
		kept := []*Rule{}
		for _, rule := range state.rules {
			if all || rule.ID == id {
				close(rule.removed)
			} else {
				kept = append(kept, rule)
			}
		}
		state.rules = kept
		reply(w, kept)
	})
	mux.HandleFunc("POST /cut", func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		rule := &Rule{Door: query.Get("door"), Method: query.Get("method"), Path: query.Get("path"), Query: query.Get("query"), Agent: query.Get("agent")}
		if err := rule.compile(); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		state.mutex.Lock()
		defer state.mutex.Unlock()
		cut := 0
		for line := range state.open {
			if rule.matches([5]string{line.Door, line.Method, line.Path, line.Query, line.Agent}) {
				line.cancel()
				cut++
			}
		}
		reply(w, map[string]int{"cut": cut})
	})
	mux.HandleFunc("GET /requests", func(w http.ResponseWriter, r *http.Request) {
		since, _ := strconv.Atoi(r.URL.Query().Get("since"))
		state.mutex.Lock()
		defer state.mutex.Unlock()
		found := []*Request{}
		for _, line := range state.requests {
			if line.N > since {
				found = append(found, line)
			}
		}
		reply(w, map[string]any{"count": state.count, "requests": found})
	})
	return mux
}

func reply(w http.ResponseWriter, what any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(what); err != nil {
		fmt.Println("control:", err)
	}
}
